"""Held-out rows are chosen record by record; splits by position or by permutation fail the same check."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lipdp_lightning.data_modules.base import PrivateDataModule
from lipdp_lightning.data_modules.splits import checked_split, hashed_split

N = 2000


def records() -> tuple[Tensor, Tensor]:
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(N) % 3


def by_permutation(x: Tensor, y: Tensor) -> Tensor:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(len(x), dtype=torch.bool)
    mask[order[: len(x) // 5]] = True
    return mask


def by_position(x: Tensor, y: Tensor) -> Tensor:
    return torch.arange(len(x)) % 5 == 0


def by_last_rows(x: Tensor, y: Tensor) -> Tensor:
    return torch.arange(len(x)) >= len(x) - len(x) // 5


def by_position_from_the_end(x: Tensor, y: Tensor) -> Tensor:
    return torch.arange(len(x)).flip(0) % 5 == 0


def by_feature(x: Tensor, y: Tensor) -> Tensor:
    return x[:, 0] > 0.8416  # a fifth of a standard normal


def moved(mask_before: Tensor, mask_after: Tensor, removed: int) -> int:
    """How many OTHER records changed sides when one was removed."""
    kept = torch.cat([mask_before[:removed], mask_before[removed + 1 :]])
    return int((kept != mask_after).sum())


@pytest.mark.parametrize("removed", [0, 1, N // 2, N - 1])
def test_removing_a_record_moves_no_other(removed: int) -> None:
    x, y = records()
    fewer = torch.cat([x[:removed], x[removed + 1 :]])
    assert moved(hashed_split(x, 0.2), hashed_split(fewer, 0.2), removed) == 0
    # the same check on a seeded permutation, which is what random_split does
    fewer_y = torch.cat([y[:removed], y[removed + 1 :]])
    assert moved(by_permutation(x, y), by_permutation(fewer, fewer_y), removed) > N / 5


def test_reordering_the_file_changes_nothing() -> None:
    x, _ = records()
    order = torch.randperm(N)
    assert torch.equal(hashed_split(x, 0.2)[order], hashed_split(x[order], 0.2))


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5])
def test_the_share_held_out_is_the_declared_one(fraction: float) -> None:
    held = hashed_split(records()[0], fraction).double().mean().item()
    assert abs(held - fraction) < 4 * (fraction * (1 - fraction) / N) ** 0.5


def test_copies_of_a_row_fall_on_one_side_and_salts_differ() -> None:
    x, _ = records()
    twice = hashed_split(torch.cat([x, x]), 0.2)
    assert torch.equal(twice[:N], twice[N:])
    assert (hashed_split(x, 0.2) != hashed_split(x, 0.2, salt="other")).any()


@pytest.mark.parametrize("split", [by_permutation, by_position, by_position_from_the_end, by_last_rows])
def test_a_split_that_moves_other_records_is_refused(split) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"moves other records.*\nHINT"):
        checked_split(*records(), split)


def test_a_split_by_content_is_accepted() -> None:
    x, y = records()
    assert torch.equal(checked_split(x, y, by_feature), by_feature(x, y))


@pytest.mark.parametrize("wrong", [torch.zeros(N), torch.zeros(N - 1, dtype=torch.bool), torch.tensor([3, 4])])
def test_a_split_must_return_one_bool_per_row(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match="not one bool per row"):
        checked_split(*records(), lambda x, y: wrong)


class Records(PrivateDataModule):
    input_shape = (4,)
    task = "classification"
    num_classes = 3
    declared_size = N

    def load_train(self) -> tuple[Tensor, Tensor]:
        return records()


def test_a_custom_split_must_keep_to_its_declared_share() -> None:
    module = Records(validation_fraction=0.2, split=by_feature)
    module.setup()
    assert module.dataset_size == 1600
    held_out = next(iter(module.val_dataloader()))[0]
    assert (held_out[:, 0] > 0.8416).all()
    with pytest.raises(ValueError, match=r"declared share is 0\.5\nHINT"):
        Records(validation_fraction=0.5, split=by_feature).setup()


def test_a_split_with_an_empty_side_is_refused() -> None:
    with pytest.raises(ValueError, match="holds out every row"):
        Records(validation_fraction=0.2, split=lambda x, y: torch.ones(len(x), dtype=torch.bool)).setup()
