"""DP-SGD on the engine: what one example adds is within the clip radius, whatever the example and the network."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from clipped_steps import (
    CLIPPINGS,
    SCALINGS,
    ClippedSteps,
    clip_plan,
    example_gradients,
    loud_batch,
    reference_factor,
)
from hypothesis import given
from hypothesis import strategies as st
from private_step import make_network, with_example
from torch import Tensor, nn

from lipdp_lightning.clipping import clipper as clipper_module
from lipdp_lightning.clipping.clipper import OpacusClipper
from lipdp_lightning.clipping.factors import clip_factors


@given(st.lists(st.floats(0, 1e30), min_size=1, max_size=8), st.floats(1e-6, 1e6), st.sampled_from(CLIPPINGS))
def test_a_factor_keeps_a_norm_within_the_radius(norms: list[float], radius: float, clipping: str) -> None:
    values = torch.tensor(norms, dtype=torch.float64)
    factors = clip_factors(values, radius, clipping)
    assert (factors * values <= radius * (1 + 1e-12)).all() and (factors >= 0).all()
    expected = [reference_factor(n, radius, clipping) for n in norms]
    assert torch.allclose(factors, torch.tensor(expected, dtype=torch.float64), rtol=1e-12)


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_what_is_not_finite_counts_as_zero(clipping: str) -> None:
    assert clip_factors(torch.tensor([math.inf, math.nan]), 1.0, clipping).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("name", ["mlp", "convnet"])
def test_the_sum_is_that_of_examples_clipped_one_by_one(name: str, scaling: str, clipping: str) -> None:
    network, shape = make_network(name, gain=3.0)
    plan = clip_plan(scaling, clipping, 0.9)
    steps = ClippedSteps(network.double(), shape, plan, chunks=2)
    x, y, ids = loud_batch(shape, 5)
    batch = (x.double(), y, ids)
    found = steps.release(batch)
    gradients = example_gradients(steps.module, batch)
    for group in steps.mechanism.certificate.groups:
        parts = [torch.cat([g[n].flatten() for n in group.parameters]) for g in gradients]
        radius = 0.9 / math.sqrt(len(steps.mechanism.certificate.groups))
        expected = sum(reference_factor(float(p.norm()), radius, clipping) * p for p in parts)
        # a ghost norm is an upper bound: a little above the norm, or far above where positions cancel
        assert torch.allclose(found[group.name], expected, rtol=1e-4, atol=1e-6)


def adversaries(steps: ClippedSteps, shape: tuple[int, ...], classes: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs on the sphere with each label: some pass the network's largest gradients."""
    torch.manual_seed(5)
    inputs = [torch.ones(shape), -torch.ones(shape), *torch.randn(4, *shape)]
    return [(1e3 * x, torch.tensor(label)) for x in inputs for label in (0, classes - 1)]


def largest_shift(name: str, plan: Any, clipper: type[OpacusClipper] = OpacusClipper, chunks: int = 1) -> float:
    network, shape = make_network(name, gain=20.0)
    steps = ClippedSteps(network, shape, plan, chunks=chunks, clipper=clipper)
    batch = loud_batch(shape, 5)
    without = steps.release(batch)
    return max(steps.shift(without, with_example(batch, *example)) for example in adversaries(steps, shape, 5))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(
    ("name", "clipping", "chunks"),
    [("mlp", "local", 3), ("mlp", "global", 1), ("mlp", "automatic", 1), ("convnet", "local", 1)],
)
def test_one_example_moves_a_step_by_its_radius_at_most(name: str, scaling: str, clipping: str, chunks: int) -> None:
    radius = 1e3 if clipping == "global" else 0.3  # a radius that some gradients pass, or the test is empty
    shift = largest_shift(name, clip_plan(scaling, clipping, radius), chunks=chunks)
    assert shift <= 1
    if clipping != "global":
        assert shift > 0.9  # and it is attained


def test_a_layer_used_twice_is_clipped_with_both_uses() -> None:
    assert 0.9 < largest_shift("tied", clip_plan("clip_flat")) <= 1
    assert 0.9 < largest_shift("tied", clip_plan("clip_per_layer")) <= 1


# ---- broken variants, which the same measure catches


class ClipsTheMean(OpacusClipper):
    """Clips the sum of the batch once, as a clipping of mini-batches would."""

    def _summed(self, rows: Any, loss_of: Any, clipping: str) -> Any:
        loss = loss_of(rows).sum()
        sums = torch.autograd.grad(loss, self._parameters)
        norm = torch.stack([g.norm() for g in sums]).norm().reshape(1)
        factor = clip_factors(norm, self._plan.influence.norm * rows.shape[0], clipping)
        return loss, [factor * g for g in sums]


class FirstLayerOnly(OpacusClipper):
    """Takes one layer's norm for that of the whole gradient."""

    def _summed(self, rows: Any, loss_of: Any, clipping: str) -> Any:
        whole = clipper_module._norms
        clipper_module._norms = lambda gradients, views: whole(gradients[:1], views)
        try:
            return super()._summed(rows, loss_of, clipping)
        finally:
            clipper_module._norms = whole


class RadiusPerLayer(OpacusClipper):
    """Gives every layer the whole radius."""

    def _summed(self, rows: Any, loss_of: Any, clipping: str) -> Any:
        own = clipper_module.group_radius
        clipper_module.group_radius = lambda network, plan: plan.influence.norm
        try:
            return super()._summed(rows, loss_of, clipping)
        finally:
            clipper_module.group_radius = own


class ClipsMicroBatches(OpacusClipper):
    """Multiplies by the number of rows, as a mean over the micro-batch undone too late would."""

    def total(self, rows: Any, loss_of: Any, step: int) -> Any:
        return super().total(rows, loss_of, step) * 2


@pytest.mark.parametrize(
    ("broken", "scaling"),
    [
        (ClipsTheMean, "clip_flat"), (FirstLayerOnly, "clip_flat"), (RadiusPerLayer, "clip_per_layer"),
        (ClipsMicroBatches, "clip_flat"), (ClipsMicroBatches, "clip_ghost"),
    ],
)  # fmt: skip
def test_broken_clipping_is_caught(broken: type[OpacusClipper], scaling: str) -> None:
    assert largest_shift("mlp", clip_plan(scaling), broken) > 1.1


# ---- rounding and overflow


class Positions(nn.Module):
    """A layer at two positions whose cotangents are nearly opposite, on inputs that are nearly the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4, bias=False)
        self.head = nn.Linear(8, 2, bias=False)
        with torch.no_grad():
            rows = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
            self.head.weight.copy_(3e3 * torch.cat([rows, -rows], dim=1))
        self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).flatten(1))


def cancelling_example() -> tuple[Tensor, Tensor]:
    row = torch.randn(6, generator=torch.Generator().manual_seed(4)).abs() + 0.2
    x = torch.stack([row, row + 3e-4 * torch.randn(6, generator=torch.Generator().manual_seed(5))])
    return x / x.norm(), torch.tensor(1)


def cancelled_shift(monkeypatch: pytest.MonkeyPatch, samplers_of_opacus: bool) -> float:
    """The largest over some radii: a float32 norm that is too small lets a gradient above the radius through."""
    if samplers_of_opacus:
        from opacus.grad_sample import GradSampleHooksFastGradientClipping as Ghost
        from opacus.grad_sample.linear import compute_linear_norm_sample

        from lipdp_lightning.layers.scaled import ScaledLinear

        monkeypatch.setitem(Ghost.NORM_SAMPLERS, ScaledLinear, compute_linear_norm_sample)
    torch.manual_seed(0)
    network = Positions()
    x, y = cancelling_example()
    empty = (x.unsqueeze(0)[:0], y.unsqueeze(0)[:0], torch.zeros(0, dtype=torch.int64))
    found = 0.0
    for radius in (0.1, 0.2, 0.5):
        steps = ClippedSteps(network, (2, 6), clip_plan("clip_ghost", clip_norm=radius))
        found = max(found, steps.shift(steps.release(empty), with_example(empty, x, y)))
    return found


def test_ghost_norms_hold_where_positions_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cancelled_shift(monkeypatch, samplers_of_opacus=False) <= 1


def test_norms_of_float32_differences_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cancelled_shift(monkeypatch, samplers_of_opacus=True) > 1.05


class Overflows(nn.Module):
    """Finite for small inputs; 1e30 x 1e30 is infinite in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4, bias=False), nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            self.first.weight.fill_(1e30)
            self.second.weight.copy_(torch.tensor([[1.0], [-1.0]]) * torch.ones(2, 4) * 1e10)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_an_example_that_overflows_adds_nothing(scaling: str) -> None:
    steps = ClippedSteps(Overflows(), (6,), clip_plan(scaling))
    quiet = -torch.rand(4, 6) / 10, torch.zeros(4, dtype=torch.int64), torch.arange(4)
    loud = with_example(quiet, torch.ones(6) / 3, torch.tensor(0))
    first, second = steps.release(quiet), steps.release(loud)
    for name in first:
        assert torch.isfinite(second[name]).all()
        assert torch.equal(first[name], second[name])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_trained_layer_in_eval_mode_is_refused(scaling: str) -> None:
    network, shape = make_network("mlp")
    steps = ClippedSteps(network, shape, clip_plan(scaling))
    steps.module.network[1].eval()
    with pytest.raises(ValueError, match="1 is trained in eval mode"):
        steps.release(loud_batch(shape, 5))


def test_nothing_of_opacus_is_left_on_the_network() -> None:
    network, shape = make_network("mlp")
    for scaling in SCALINGS:
        steps = ClippedSteps(network, shape, clip_plan(scaling))
        steps.release(loud_batch(shape, 5))
        for module in steps.module.network.modules():
            assert not module._forward_hooks and not module._backward_hooks and not hasattr(module, "activations")
        for parameter in steps.module.network.parameters():
            assert not {"grad_sample", "_norm_sample", "_forward_counter"} & set(vars(parameter))


@pytest.mark.parametrize("scaling", ["clip_flat", "clip_per_layer"])
def test_the_mean_over_views_is_clipped_and_not_each_view(scaling: str) -> None:
    """Rows of one example share the factor of their mean: the sum over K views, divided by K, is within the radius."""
    views, network = 3, nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    plan = clip_plan(scaling, clip_norm=0.5)
    x, y = torch.randn(6, 6), torch.tensor([0, 1, 2, 3, 3, 3])

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(network(rows), y, reduction="none")

    parameters = list(network.parameters())
    expected = [torch.zeros_like(p) for p in parameters]
    together = [(0, 1), (2, 3)] if scaling == "clip_per_layer" else [(0, 1, 2, 3)]
    radius = 0.5 / len(together) ** 0.5
    for first in (0, views):
        loss = loss_of(x)[first : first + views].mean()
        gradients = torch.autograd.grad(loss, parameters)
        for members in together:
            norm = torch.cat([gradients[i].flatten() for i in members]).norm()
            for i in members:
                expected[i] += gradients[i] * min(1.0, radius / float(norm))
    OpacusClipper(network, plan, views).total(x, loss_of, 0).backward()
    for parameter, mean in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad / views, mean, rtol=1e-4, atol=1e-6)
