"""Augmentations draw by example, and whatever mixes examples is found before training."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lipdp_lightning.augmentations import Augmentation, Draws, HorizontalFlip, PerExample, ShiftedCrop
from lipdp_lightning.training.views import Views, independence_problems

SHAPE = (2, 6, 5)


def images(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(seed))


def key(purpose: str, *indices: int) -> int:
    return hash((7, *indices))


def views_of(x: Tensor, ids: Tensor, number: int, *augmentations: nn.Module) -> Tensor:
    return Views(number, augmentations).expand(x, ids, ids, key)[0].unflatten(0, (-1, number))


def test_draws_are_uniform_and_of_their_row_alone() -> None:
    draws = Draws(3, torch.arange(4000))
    first, second = draws.uniform(3), draws.uniform(3)
    assert abs(float(first.mean()) - 0.5) < 0.01 and abs(float(first.var()) - 1 / 12) < 0.002
    assert abs(float(torch.corrcoef(torch.cat([first, second], 1).T)[0, 1:].abs().max())) < 0.06
    alone = Draws(3, torch.tensor([17]))
    assert torch.equal(alone.uniform(3)[0], first[17]) and torch.equal(alone.uniform(3)[0], second[17])
    shifts = Draws(5, torch.arange(4000)).integers(-2, 2).flatten()
    assert set(shifts.tolist()) == {-2, -1, 0, 1, 2} and int(torch.bincount(shifts + 2).min()) > 650


@pytest.mark.parametrize("mode", ["reflect", "zeros"])
def test_a_shifted_crop_is_a_crop_of_the_padded_image(mode: str) -> None:
    x, rows = images(40), torch.arange(40)
    moved = ShiftedCrop(2, mode)(x, Draws(1, rows))
    shifts = Draws(1, rows).integers(-2, 2, 2)
    padded = nn.functional.pad(x, (2, 2, 2, 2), mode="constant" if mode == "zeros" else "reflect")
    for i, (down, right) in enumerate(shifts.tolist()):
        assert torch.equal(moved[i], padded[i, :, 2 + down : 8 + down, 2 + right : 7 + right])
    assert len({tuple(s) for s in shifts.tolist()}) > 15


def test_a_flip_mirrors_some() -> None:
    x = images(200)
    flipped = HorizontalFlip(0.25)(x, Draws(2, torch.arange(200)))
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(flipped, x, strict=True)]
    assert 30 < sum(mirrored) < 75
    assert all(m or torch.equal(a, b) for m, a, b in zip(mirrored, flipped, x, strict=True))


def test_views_of_an_example_do_not_depend_on_the_others_or_on_its_place() -> None:
    x, ids = images(30), torch.arange(30)
    augmentations = HorizontalFlip(), ShiftedCrop(2), PerExample(Jitter())
    whole = views_of(x, ids, 3, *augmentations)
    chosen = torch.tensor([21, 4, 9])
    assert torch.equal(views_of(x[chosen], ids[chosen], 3, *augmentations), whole[chosen])
    assert not torch.equal(whole[:, 0], whole[:, 1]), "one draw for all views"


def test_numbers_of_views_are_numbers_of_their_own() -> None:
    x, y = images(3), torch.tensor([5, 6, 7])
    _, labels, rows = Views(4, []).expand(x, y, torch.tensor([2, 0, 9]), key)
    assert labels.tolist() == [5] * 4 + [6] * 4 + [7] * 4
    assert rows.tolist() == [8, 9, 10, 11, 0, 1, 2, 3, 36, 37, 38, 39]


def test_an_empty_batch_has_no_views_and_calls_no_module() -> None:
    x, y = images(0), torch.zeros(0, dtype=torch.int64)
    views, labels, rows = Views(3, [BatchStatistics()]).expand(x, y, y, key)
    assert views.shape == (0, *SHAPE) and len(labels) == len(rows) == 0


def test_torchs_generator_is_left_where_it_was() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    views_of(images(4), torch.arange(4), 2, OneDrawForAll(), PerExample(Jitter()))
    assert torch.equal(torch.rand(2), expected)


# ---- what is refused


class Mixup(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        share = torch.rand(()) * 0.01
        return (1 - share) * x + share * x[torch.randperm(len(x))]


class RareCutMix(nn.Module):
    """One call in five pastes a corner of the next example."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.2:
            x = x.clone()
            x[:, :, :2, :2] = x.roll(1, 0)[:, :, :2, :2]
        return x


class BatchStatistics(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().max()


class Jitter(nn.Module):
    """Draws by row from torch's generator."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class OneDrawForAll(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (0.5 + torch.rand(()))


class FromNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(np.random.rand())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[: len(x) // 2]


class RowKeyed(Augmentation):
    """Has the draws of its rows, and does not use them."""

    def forward(self, x: Tensor, draws: Draws) -> Tensor:
        return x + torch.arange(len(x)).reshape(-1, 1, 1, 1)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Mixup(), "mixes examples"),
        (RareCutMix(), "mixes examples"),
        (BatchStatistics(), "mixes examples"),
        (nn.BatchNorm2d(2), "mixes examples|does not repeat"),
        (Jitter(), "draws by the row.*PerExample"),
        (nn.Dropout(0.5), "draws by the row"),
        (RowKeyed(), "draws by the row"),
        (FromNumpy(), "does not repeat its views"),
        (Counting(), "does not repeat its views"),
        (Half(), r"returned \(2, 2, 6, 5\)|as many rows"),
        (nn.Flatten(), "of the same shape"),
        (nn.Conv2d(3, 2, 1), "fails on rows of the data's shape"),
        (ShiftedCrop(5), "no 5 pixels to reflect"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_what_mixes_or_re_deals_examples_is_refused(module: nn.Module, reason: str) -> None:
    (problem,) = independence_problems(Views(16, [module]), SHAPE)
    assert type(module).__name__ in problem and "HINT" in problem

    assert re.search(reason, problem, re.DOTALL), problem


@pytest.mark.parametrize(
    "module",
    [
        HorizontalFlip(), ShiftedCrop(2), ShiftedCrop(9, "zeros"), PerExample(Jitter()), OneDrawForAll(), nn.Identity(),
        nn.Conv2d(2, 2, 3, padding=1).requires_grad_(False),
    ],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_what_works_row_by_row_is_accepted(module: nn.Module) -> None:
    assert independence_problems(Views(16, [module]), SHAPE) == []


def test_images_are_needed_for_images() -> None:
    (problem,) = independence_problems(Views(2, [HorizontalFlip()]), (13,))
    assert "HorizontalFlip was given rows of shape (13,)" in problem and "HINT" in problem


@pytest.mark.parametrize("bad", [0, -1, 2.5, True])
def test_a_number_of_views_is_a_number(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"views=.*HINT"):
        Views(bad, [])


def test_settings_are_in_the_identity() -> None:
    def blur(scale: float) -> nn.Conv2d:
        layer = nn.Conv2d(2, 2, 1)
        nn.init.constant_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
        return layer

    class Tuned(nn.Module):  # with torch's default repr
        def __init__(self, strength: float) -> None:
            super().__init__()
            self._strength = strength

        def forward(self, x: Tensor) -> Tensor:
            return x * self._strength

    different = [
        Views(2, []), Views(3, []), Views(2, [HorizontalFlip()]), Views(2, [HorizontalFlip(0.4)]),
        Views(2, [ShiftedCrop(2), HorizontalFlip()]), Views(2, [HorizontalFlip(), ShiftedCrop(2)]),
        Views(2, [Tuned(0.5)]), Views(2, [Tuned(0.6)]), Views(2, [blur(0.5)]), Views(2, [blur(0.6)]),
        Views(2, [PerExample(Tuned(0.5))]), Views(2, [PerExample(Tuned(0.6))]),
    ]  # fmt: skip
    assert len({views.identity() for views in different}) == len(different)
    assert Views(2, [Tuned(0.5)]).identity() == Views(2, [Tuned(0.5)]).identity()
