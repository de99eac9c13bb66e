"""K views of an example: the mean that is released moves by one view's bound, whatever the views are."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from private_step import Harness, Noiseless, make_plan, random_batch, strongest
from test_released_sum import CLASSES, SCALINGS, TOLERANCE, candidates, harness_of, plan_of, shift
from torch import Tensor

from lipdp_lightning.augmentations import Augmentation, Draws
from lipdp_lightning.mechanism.noise import Sum
from lipdp_lightning.mechanism.scaling import StepNumbers
from lipdp_lightning.mechanism.step import Mechanism
from lipdp_lightning.training.module import ClippedLoss
from lipdp_lightning.training.views import Views

K = 4


def key(purpose: str, *indices: int) -> int:
    return hash(indices)


def with_views(network: str, plan: Any, views: Views | None = None, kind: type[Mechanism] = Noiseless) -> Harness:
    """A harness whose batches are expanded as the Strategy's are."""
    views = Views(K, []) if views is None else views
    harness = harness_of(network, plan, kind=partial(kind, views=views.number))
    strategy: Any = harness.module.trainer.strategy
    strategy.views, strategy.step_key = views, key
    return harness


def moved(harness: Harness, network: str) -> float:
    example = strongest(harness, candidates(network))
    return shift(harness, example, random_batch(12, harness.input_shape, CLASSES, seed=5))


LOGITS, INSIDE = {"loss_clip": 0.05}, {"cotangent_clip": [["1", 0.02]]}


@pytest.mark.parametrize(
    ("scaling", "clips"),
    [*((name, {}) for name in SCALINGS), ("joint", LOGITS), ("layerwise", INSIDE), ("tracked radius", LOGITS)],
)
def test_k_identical_worst_views_move_the_release_like_one(scaling: str, clips: dict[str, Any]) -> None:
    network = "convnet"
    one, several = harness_of(network, plan_of(scaling, **clips)), with_views(network, plan_of(scaling, **clips))
    single, mean = moved(one, network), moved(several, network)
    one.mechanism.close()
    several.mechanism.close()
    assert mean <= TOLERANCE
    # the same mean over more rows, against noise with a margin for their sum
    assert mean == pytest.approx(single, rel=1e-3)


class Undivided(Noiseless):
    """Broken on purpose: releases the sum over views."""

    def _sums(self, numbers: StepNumbers) -> list[Sum]:
        return [replace(one, share=1.0) for one in super()._sums(numbers)]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_gradient_that_is_not_divided_by_the_views_breaks_the_bound(scaling: str) -> None:
    for kind, bound in ((Noiseless, 1.0), (Undivided, K**2)):
        harness = with_views("linear", plan_of(scaling, loss_clip=0.05), kind=kind)
        try:
            found = moved(harness, "linear")
        except AssertionError:
            assert kind is Undivided and "tracked" in scaling, "votes beyond their noise"
            continue
        finally:
            harness.mechanism.close()
        assert 0.98 * bound <= found <= TOLERANCE * bound


class DividedInside(ClippedLoss):
    """Broken on purpose: the mean over views is taken in the loss, before the clip."""

    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        return super().per_example(logits, target) / K


def test_a_loss_divided_by_the_views_breaks_the_bound_of_a_clip() -> None:
    harness = with_views("linear", plan_of("layerwise", loss_clip=0.02), kind=Undivided)
    assert isinstance(harness.module.loss, ClippedLoss)
    harness.module.loss = DividedInside(harness.module.loss.loss, 0.02)
    assert moved(harness, "linear") > 0.9 * K**2
    harness.mechanism.close()


class Adversary(Augmentation):
    """Each view is another candidate; some are not finite, and some are huge."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor, draws: Draws) -> Tensor:
        return self.rows[torch.arange(len(x)) % len(self.rows)].clone()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_whatever_an_augmentation_makes_of_an_example(scaling: str) -> None:
    """Views are made before the input is bounded."""
    worst = [1e4 * x for x, _ in candidates("mlp")[1:6]]
    rows = torch.stack([*worst, torch.full((12,), torch.nan), torch.full((12,), torch.inf), torch.full((12,), 1e38)])
    harness = with_views("mlp", plan_of(scaling), Views(len(rows), [Adversary(rows)]))
    for label in range(CLASSES):
        example = (torch.zeros(12), torch.tensor(label))
        assert 1e-4 < shift(harness, example, random_batch(5, (12,), CLASSES)) <= TOLERANCE
    harness.mechanism.close()


def test_the_margin_covers_the_rounding_of_more_rows() -> None:
    plan = make_plan(dataset_size=100_000, expected_batch_size=2048, scaling="layerwise", loss_clip=0.05, max_norm=None)
    harness = with_views("linear", plan, Views(16, []))
    x, y = strongest(harness, candidates("linear"))
    batch = (x.expand(2048, *x.shape).contiguous(), y.expand(2048).contiguous(), torch.arange(2048))
    assert 0.97 <= shift(harness, (x, y), batch) <= 1.0
    harness.mechanism.close()


def test_a_batch_without_examples_releases_nothing_of_any_view() -> None:
    harness = with_views("convnet", plan_of("joint"))
    empty = random_batch(0, (2, 8, 8), CLASSES)
    assert all(not released.any() for released in harness.release(empty).values())
    harness.mechanism.close()


def test_batch_max_divides_by_examples_and_not_by_views() -> None:
    plan = make_plan(scaling="batch_max", allow_noncertified=True, max_norm=None)
    batch = random_batch(6, (12,), CLASSES)

    class AsPrinted(Noiseless):
        def _sums(self, numbers: StepNumbers) -> list[Sum]:
            return [replace(one, divisor=self.divisor()) for one in super()._sums(numbers)]

    releases = [
        harness_of("mlp", plan, kind=AsPrinted).release(batch),
        with_views("mlp", plan, kind=AsPrinted).release(batch),
    ]
    for name, values in releases[0].items():
        assert torch.allclose(values, releases[1][name], rtol=1e-5, atol=1e-9)


def test_views_that_the_mechanism_does_not_know_of_are_refused() -> None:
    harness = harness_of("mlp", plan_of("joint"))
    harness.module.trainer.strategy.views = Views(K, [])
    with pytest.raises(ValueError, match=r"divides by 1.*HINT"):
        harness.release(random_batch(3, (12,), CLASSES))
    harness.mechanism.close()
