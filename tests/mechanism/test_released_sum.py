"""One adversarial example more or less: how far the released sum moves, in standard deviations of its noise.

The condition of docs/guarantee.md, "what is released": sum_k ||shift_k||^2 / sigma_k^2 <= 1 / sigma^2 for neighbouring
batches. Checked on what the whole mechanism releases, its noise set aside; the same check must fail for scalings
that look at the batch and for clipping done in the wrong order.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import pytest
import torch
from private_step import (
    NETWORKS,
    Batch,
    Example,
    Harness,
    influential_examples,
    linear,
    mahalanobis,
    make_network,
    make_plan,
    random_batch,
    strongest,
    with_example,
)  # fmt: skip
from torch import Tensor, nn

from lipdp_lightning.bounds.losses import CrossEntropy
from lipdp_lightning.layers import CotangentClip, ScaledLinear, scale_cotangent
from lipdp_lightning.training.module import ClippedLoss

TOLERANCE = 1 + 1e-5
CLASSES = 5
GAIN = 3.0
MICRO_BATCHES = 4
ALLOCATIONS = ("equal", "global", "optimal", "custom")
SCALINGS: dict[str, dict[str, Any]] = {
    "worst_case": {"scaling": "worst_case"},
    "layerwise": {"scaling": "layerwise"},
    "joint": {"scaling": "joint"},
    "radius": {"scaling": "radius", "radius": 0.7},
    "tracked radius": {"scaling": "radius", "radius_quantile": 0.5, "radius_noise_multiplier": 3.0},
    "exact": {"scaling": "exact", "radius": 0.02},
    "exact, tracked": {"scaling": "exact", "radius_quantile": 0.5, "radius_noise_multiplier": 3.0},
    "exact_layerwise": {"scaling": "exact_layerwise", "radius": 0.02},
}


def plan_of(scaling: str, allocation: str = "global", **options: Any) -> Any:
    weights = {"group_weights": [["[1i]*", 2.0], ["*", 1.0]]} if allocation == "custom" else {}
    return make_plan(**SCALINGS[scaling], allocation=allocation, max_norm=None, **weights, **options)


def harness_of(network: str, plan: Any, **options: Any) -> Harness:
    built, shape = make_network(network, gain=GAIN)
    return Harness(built, shape, plan, **options)


@lru_cache
def candidates(network: str) -> list[Example]:
    harness = harness_of(network, make_plan(max_norm=None))
    found = influential_examples(harness, CLASSES)
    harness.mechanism.close()
    return found


def shift(harness: Harness, example: Example, batch: Batch) -> float:
    """sum_k ||shift_k||^2 sigma^2 / sigma_k^2 of what is released on the batch with the example and without it."""
    without = harness.release(batch)
    votes = harness.mechanism.votes
    moved = mahalanobis(harness.release(with_example(batch, *example)), without, harness.mechanism.deviations())
    if votes is not None:
        # the second query of the step, against its own noise
        one = (harness.mechanism.votes - votes).square().sum().item()
        deviation = harness.mechanism.numbers().vote_deviation
        assert one / deviation**2 <= TOLERANCE / harness.plan.influence.radius.noise_multiplier**2
    return moved * harness.plan.noise_multiplier**2


def largest_shift(harness: Harness, network: str, size: int = 24) -> float:
    example = strongest(harness, candidates(network))
    return shift(harness, example, random_batch(size, harness.input_shape, CLASSES, seed=5))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("network", NETWORKS)
def test_no_example_moves_the_released_sum_beyond_its_noise(network: str, scaling: str) -> None:
    for allocation in ALLOCATIONS if network in ("mlp", "tied") else ("global",):
        harness = harness_of(network, plan_of(scaling, allocation))
        moved = largest_shift(harness, network)
        harness.mechanism.close()
        assert 0.005 < moved <= TOLERANCE, allocation


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("clips", [{"loss_clip": 0.05}, {"cotangent_clip": [["1", 0.02]]}])
def test_clipped_cotangents_bound_the_sum_in_every_number_of_micro_batches(scaling: str, clips: dict[str, Any]) -> None:
    """The radius is that of an example's whole loss: what Lightning divides by is multiplied back."""
    shifts = []
    for chunks in (1, 3):
        harness = harness_of("convnet", plan_of(scaling, **clips), chunks=chunks)
        shifts.append(largest_shift(harness, "convnet"))
        harness.mechanism.close()
    assert shifts[0] <= TOLERANCE and shifts[1] <= TOLERANCE
    assert shifts[0] == pytest.approx(shifts[1], rel=1e-3)


def test_clip_at_the_logits_makes_a_linear_model_reach_its_bound() -> None:
    """Boundary inputs whose clipped cotangent has the radius itself: every scaling is tight here."""
    for scaling in SCALINGS:
        harness = harness_of("linear", plan_of(scaling, loss_clip=0.05))
        assert 0.99 <= largest_shift(harness, "linear") <= TOLERANCE
        harness.mechanism.close()


@pytest.mark.parametrize("scaling", ["worst_case", "layerwise", "joint"])
def test_a_saturated_linear_model_reaches_its_bound_without_clips(scaling: str) -> None:
    """Otherwise the tests above could pass by slack alone."""
    torch.manual_seed(1)
    network = linear()
    with torch.no_grad():
        network[1].weight.mul_(100)
    harness = Harness(network, (12,), plan_of(scaling))
    example = strongest(harness, influential_examples(harness, CLASSES))
    assert 0.98 <= shift(harness, example, random_batch(24, (12,), CLASSES)) <= TOLERANCE
    harness.mechanism.close()


def test_aligned_gradients_of_a_large_batch_stay_within_the_margin() -> None:
    """The sum of 4096 equal gradients is rounded at its own size; the margin covers what that moves."""
    plan = make_plan(dataset_size=100_000, expected_batch_size=4096, scaling="layerwise", loss_clip=0.05, max_norm=None)
    harness = harness_of("linear", plan)
    x, y = strongest(harness, candidates("linear"))
    size = 4096
    batch = (x.expand(size, *x.shape).contiguous(), y.expand(size).contiguous(), torch.arange(size))
    assert 0.99 <= shift(harness, (x, y), batch) <= 1.0
    harness.mechanism.close()


# ---- the same check fails


def white_image_and_digits(size: int, seed: int = 0) -> tuple[Batch, float]:
    """Grey images with values in [0, 1]: handwritten digits if LIPDP_DATA has them, else blobs of that norm."""
    generator = torch.Generator().manual_seed(seed)
    if os.environ.get("LIPDP_DATA"):
        from lipdp_lightning.data_modules import MNIST

        try:
            images, labels = MNIST().load_train()
        except ValueError:
            pass
        else:
            rows = torch.randperm(len(images), generator=generator)[:size]
            return (images[rows].float() / 255, labels[rows], torch.arange(size)), 28.0
    x = torch.rand(size, 1, 28, 28, generator=generator) * (torch.rand(size, 1, 28, 28, generator=generator) < 0.15)
    return (x, torch.randint(10, (size,), generator=generator), torch.arange(size)), 28.0


def factor_of_white(scaling: str, size: int = 256) -> float:
    """How many claimed bounds an all-white image moves a linear model's summed gradient."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    batch, bound = white_image_and_digits(size)
    options = {"allow_noncertified": True} if scaling == "batch_max" else {}
    plan = make_plan(dataset_size=60_000, scaling=scaling, expected_batch_size=size, **options)
    harness = Harness(network, (1, 28, 28), plan, input_bound=bound)
    worst = 0.0
    for label in range(10):
        worst = max(worst, shift(harness, (torch.ones(1, 28, 28), torch.tensor(label)), batch))
    harness.mechanism.close()
    return worst**0.5


def test_scaling_by_the_batch_maximum_fails_and_by_the_example_passes() -> None:
    assert factor_of_white("layerwise") <= TOLERANCE
    assert factor_of_white("worst_case") <= TOLERANCE
    factor = factor_of_white("batch_max")
    assert factor > 2
    # it grows with the batch: no constant repairs it
    assert factor_of_white("batch_max", 1024) > 1.5 * factor


def one_layer_sum(x: Tensor, y: Tensor, radius: float, order: str) -> Tensor:
    """The gradient of one linear layer, its logits clipped to the radius and scaled by 1 / n."""
    torch.manual_seed(0)
    layer = ScaledLinear(x.shape[1], CLASSES)
    norms = layer.example_norms(x).detach()
    logits, clip = layer(x), CotangentClip(radius)
    # what stands nearer to the loss acts first in the backward pass
    if order == "clip, then scale":
        logits = clip(scale_cotangent(logits, 1 / norms))
    else:
        logits = scale_cotangent(clip(logits), 1 / norms)
    CrossEntropy().per_example(logits, y).sum().backward()
    assert layer.weight.grad is not None and layer.bias.grad is not None
    return torch.cat([layer.weight.grad.flatten(), layer.bias.grad])


def test_scaling_before_clipping_breaks_the_bound() -> None:
    """||c g|| <= R for c = 1 / n after clipping to R. Scaled first, a cotangent slips under the radius."""
    x, y = 30 * torch.ones(1, 9), torch.tensor([0])  # a wrong label, by far
    assert one_layer_sum(x, y, 0.01, "clip, then scale").norm() <= 0.01 * TOLERANCE
    assert one_layer_sum(x, y, 0.01, "scale, then clip").norm() > 0.5


class DividedInside(ClippedLoss):
    """Divides by the number of micro-batches where the clip does not see it."""

    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        return super().per_example(logits, target) / MICRO_BATCHES


def test_a_radius_that_is_not_multiplied_back_breaks_the_bound() -> None:
    """A loss divided by K shrinks cotangents before the clip; restored to a sum of losses the bound is K R."""
    harness = harness_of("linear", plan_of("layerwise", loss_clip=0.02), chunks=MICRO_BATCHES)
    example = strongest(harness, candidates("linear"))
    batch = random_batch(24, (12,), CLASSES)
    assert shift(harness, example, batch) <= TOLERANCE
    assert isinstance(harness.module.loss, ClippedLoss)
    harness.module.loss = DividedInside(harness.module.loss.loss, 0.02)
    assert shift(harness, example, batch) * MICRO_BATCHES**2 > 0.9 * MICRO_BATCHES**2
    harness.mechanism.close()
