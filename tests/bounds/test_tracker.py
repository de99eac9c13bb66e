"""Norms between exact evaluations: bounds stay above the truth along any path, and refresh when they must."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lipdp_lightning.bounds.norms import NormEntry, NormTracker, conv_norm, dense_norm, kappa

CONV = {"padding": 1, "input_size": 8}


def conv_truth(kernel: Tensor) -> float:
    layer = nn.Conv2d(kernel.shape[1], kernel.shape[0], 3, padding=1, bias=False).double()
    layer.weight.data.copy_(kernel)
    count = kernel.shape[1] * 64
    with torch.no_grad():
        operator = layer(torch.eye(count, dtype=torch.float64).reshape(count, kernel.shape[1], 8, 8)).flatten(1)
    return float(torch.linalg.svdvals(operator)[0])


def dense_truth(weight: Tensor) -> float:
    return float(torch.linalg.svdvals(weight.double())[0])


def conv_entry(kernel: Tensor, factor: float | None = None) -> NormEntry:
    exact = partial(conv_norm, **CONV)
    return NormEntry(kernel, exact, kappa((3, 3), padding=1) if factor is None else factor, "conv")


class Counting:
    def __init__(self, norm: Callable[[Tensor], float] = dense_norm) -> None:
        self.calls = 0
        self.norm = norm

    def __call__(self, weight: Tensor) -> float:
        self.calls += 1
        return self.norm(weight)


def worst_ratio(factor: float | None, slack: float) -> float:
    """Smallest bound / truth while a kernel grows along the constant kernel, the worst direction for kappa."""
    kernel = torch.zeros(1, 1, 3, 3)
    kernel[0, 0, 1, 1] = 1.0
    tracker = NormTracker([conv_entry(kernel, factor)], slack=slack)
    ratios = []
    for _ in range(20):
        kernel.add_(torch.full_like(kernel, 0.01))
        ratios.append(tracker.update()[0] / conv_truth(kernel))
    return min(ratios)


@pytest.mark.parametrize("slack", [0.0, 0.05, 0.5])
def test_growing_kernel_never_below_the_truth(slack: float) -> None:
    assert worst_ratio(None, slack) >= 1.0 - 1e-9


def test_update_without_kappa_fails_the_same_check() -> None:
    assert worst_ratio(1.0, slack=0.5) < 1.0 - 1e-2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_random_walk_never_below_the_truth_and_within_the_slack(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(12, 20, generator=generator).to(dtype)
    kernel = torch.randn(3, 2, 3, 3, generator=generator).to(dtype)
    tracker = NormTracker([NormEntry(dense, dense_norm), conv_entry(kernel)], slack=0.1)
    for _ in range(60):
        for weight in (dense, kernel):
            weight.add_((0.01 * torch.randn(weight.shape, generator=generator)).to(dtype))
        for bound, norm in zip(tracker.update(), (dense_truth(dense), conv_truth(kernel.double())), strict=True):
            # a refreshed value is at most 1.25 high (test_conv_norms), a cheap one 1.1 times that, plus the drift
            assert norm * (1 - 1e-12) <= bound <= norm * 1.25 * 1.1 * 1.15
    assert 2 < tracker.refreshes < 100


def test_only_the_layer_that_moved_is_refreshed() -> None:
    weights = [torch.eye(4) for _ in range(5)]
    counters = [Counting() for _ in weights]
    tracker = NormTracker([NormEntry(w, c) for w, c in zip(weights, counters, strict=True)], slack=0.05)
    assert [c.calls for c in counters] == [1] * 5
    weights[3].mul_(2.0)
    weights[1][0, 0] += 0.01
    bounds = tracker.update()
    assert [c.calls for c in counters] == [1, 1, 1, 2, 1]
    assert bounds[3] == pytest.approx(2.0) and bounds[1] == pytest.approx(1.01, rel=1e-6)
    assert bounds[0] == dense_norm(weights[0])


def test_refreshed_exactly_beyond_the_slack() -> None:
    weight, counter = torch.eye(3, dtype=torch.float64), Counting()
    tracker = NormTracker([NormEntry(weight, counter)], slack=0.1)
    weight[0, 1] = 0.0999
    assert tracker.update()[0] == pytest.approx(1.0999, rel=1e-9)
    assert counter.calls == 1
    weight[0, 1] = 0.1001
    assert tracker.update()[0] == pytest.approx(dense_truth(weight), rel=1e-9)
    assert counter.calls == 2


def test_shrinking_weight_keeps_a_valid_if_loose_bound() -> None:
    weight = torch.eye(3)
    tracker = NormTracker([NormEntry(weight, dense_norm)], slack=10.0)
    weight.mul_(0.5)
    assert tracker.update()[0] >= 0.5


def test_difference_below_the_square_root_of_the_float32_range_is_counted() -> None:
    """Squared in float32 a difference of 1e-30 is zero; it is not lost here."""
    weight = torch.zeros(8, 8)
    tracker = NormTracker([NormEntry(weight, dense_norm)])
    weight.fill_(1e-30)
    assert float(torch.linalg.vector_norm(weight)) == 0.0
    assert tracker.update()[0] >= 8e-30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_of_the_subtraction_is_covered(dtype: torch.dtype) -> None:
    """1 x 1 weights: s(W) - s(W0) = |W - W0| exactly, so that a bound without margin is low about half of the time."""
    generator = torch.Generator().manual_seed(0)
    low_without_margin = 0
    for _ in range(200):
        anchor = torch.rand(1, 1, generator=generator).to(dtype) / 2
        weight = anchor.clone()
        tracker = NormTracker([NormEntry(weight, lambda w: abs(float(w)))], slack=1e9)
        weight.copy_(torch.rand(1, 1, generator=generator).to(dtype) + 1.0)
        assert tracker.update()[0] >= float(weight)
        low_without_margin += float(anchor) + float((weight - anchor).abs()) < float(weight)
    assert low_without_margin > 20


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rescaling_follows_a_radial_projection(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    kernel = torch.randn(3, 2, 3, 3, generator=generator).to(dtype)
    counter = Counting(partial(conv_norm, **CONV))
    tracker = NormTracker([NormEntry(kernel, counter, 3.0)], slack=0.2)
    for step in range(30):
        factor = 0.9 if step % 2 else 1.07
        kernel.mul_(factor)
        tracker.rescale(0, factor)
        bound = tracker.update()[0]
        assert bound >= conv_truth(kernel.double()) * (1 - 1e-12)
    if dtype != torch.bfloat16:
        assert counter.calls == 1
        assert bound <= conv_norm(kernel, **CONV) * (1 + 1e-4)


def test_forgetting_to_rescale_costs_a_refresh_and_rescaling_wrongly_is_caught() -> None:
    weight, counter = torch.eye(3), Counting()
    tracker = NormTracker([NormEntry(weight, counter)], slack=0.05)
    weight.mul_(0.5)
    assert tracker.update()[0] >= 0.5 and counter.calls == 2
    weight.mul_(2.0)
    tracker.rescale(0, 0.5)  # the wrong way: the deviation is measured, so the bound still holds
    assert tracker.update()[0] >= 1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_clipping_through_the_tracker_stores_weights_within_the_radius(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(12, 20, generator=generator).to(dtype)
    kernel = torch.randn(3, 2, 3, 3, generator=generator).to(dtype)
    free = torch.randn(4, 4, generator=generator).to(dtype)
    before = free.clone()
    counters = [Counting(), Counting(partial(conv_norm, **CONV)), Counting()]
    weights, kappas = [dense, kernel, free], [1.0, 3.0, 1.0]
    entries = [NormEntry(w, c, k) for w, c, k in zip(weights, counters, kappas, strict=True)]
    tracker = NormTracker(entries, slack=0.05)
    for _ in range(40):
        bounds = tracker.clip([1.0, 0.5, None])
        assert bounds[0] <= 1.0 and bounds[1] <= 0.5
        assert dense_truth(dense) <= bounds[0] * (1 + 1e-12)
        assert conv_truth(kernel.double()) <= bounds[1] * (1 + 1e-12)
        assert torch.equal(free, before)
        for weight in (dense, kernel):
            weight.add_((1e-3 * torch.randn(weight.shape, generator=generator)).to(dtype))
    assert counters[2].calls == 1
    if dtype != torch.bfloat16:
        assert 1 < counters[0].calls < 25


def test_weights_that_change_dtype_are_certified_anew() -> None:
    layer = nn.Linear(3, 3)
    counter = Counting()
    tracker = NormTracker([NormEntry(layer.weight, counter)])
    layer.double()
    layer.weight.data.mul_(3.0)
    assert tracker.update()[0] == pytest.approx(dense_truth(layer.weight.detach()))
    assert counter.calls == 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_weights_are_refused_by_name(value: float) -> None:
    weight = torch.eye(3)
    tracker = NormTracker([NormEntry(weight, partial(dense_norm, name="head"), name="head")], slack=1e9)
    weight[0, 0] = value
    with pytest.raises(ValueError, match=r"(?s)head.*HINT"):
        tracker.update()


def test_bad_arguments_are_refused() -> None:
    weight = torch.eye(2)
    for make in (
        lambda: NormTracker([NormEntry(weight, dense_norm)], slack=-0.1),
        lambda: NormTracker([NormEntry(weight, dense_norm, kappa=math.nan)]),
        lambda: NormTracker([NormEntry(weight, lambda _: math.nan)]),
        lambda: NormTracker([NormEntry(weight, dense_norm)]).rescale(0, -1.0),
        lambda: NormTracker([NormEntry(weight, dense_norm)]).clip([]),
        lambda: NormTracker([NormEntry(weight, dense_norm)]).clip([0.0]),
    ):
        with pytest.raises(ValueError, match="HINT"):
            make()


def test_no_weights_is_no_error() -> None:
    assert NormTracker([]).update() == []


def test_clipping_moves_the_anchor_along_and_needs_no_second_certificate() -> None:
    weight, counter = 8.0 * torch.eye(3), Counting()
    tracker = NormTracker([NormEntry(weight, counter)], slack=0.05)
    assert tracker.clip([1.0]) == [1.0]
    assert tracker.update()[0] == pytest.approx(1.0, rel=1e-5)
    assert counter.calls == 1
