"""Scalings by exact norms of each example's gradient: lipdp_lightning/mechanism/radii.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from private_step import (
    Batch,
    Branched,
    Harness,
    Noiseless,
    Tied,
    mahalanobis,
    make_network,
    make_plan,
    random_batch,
    with_example,
)  # fmt: skip
from torch import Tensor, nn

from lipdp_lightning.bounds.identity import TrustedHook
from lipdp_lightning.layers import ScaledLinear
from lipdp_lightning.mechanism import step as mechanism_module
from lipdp_lightning.mechanism.allocation import NoiseBudget, sum_margin
from lipdp_lightning.mechanism.radii import ALL, Exact, ExactLayerwise, Radii

TOLERANCE = 1 + 1e-5
CLASSES = 5


def harness_of(network: str | nn.Module, gain: float = 3.0, **options: Any) -> Harness:
    kept = {name: options.pop(name) for name in ("chunks", "kind") if name in options}
    built, shape = make_network(network, gain=gain) if isinstance(network, str) else (network, (12,))
    return Harness(built, shape, make_plan(**{"max_norm": None, "scaling": "exact", "radius": 0.05} | options), **kept)


def rows_by_autograd(harness: Harness, batch: Batch) -> list[dict[str, Tensor]]:
    """Every example's own gradient, by group, without any scaling."""
    harness.mechanism.scaling.detach(harness.module.network)
    rows = []
    for i in range(len(batch[0])):
        harness.module.zero_grad(set_to_none=True)
        logits = harness.module(batch[0][i : i + 1])
        harness.module.loss.per_example(logits, batch[1][i : i + 1]).sum().backward()
        rows.append(harness.gradients())
    harness.mechanism.scaling.attach(harness.module.network)
    return rows


@pytest.mark.parametrize("network", ["mlp", "convnet"])
def test_equal_shares_are_flat_clipping_over_its_radius(network: str) -> None:
    first = harness_of(network)
    batch = random_batch(24, first.input_shape, CLASSES)
    rows = rows_by_autograd(first, batch)
    sizes = [math.hypot(*(float(g.norm()) for g in row.values())) for row in rows]
    radius = sorted(sizes)[12]
    expected: dict[str, Any] = dict.fromkeys(first.mechanism.sensitivities(), 0.0)
    for row, size in zip(rows, sizes, strict=True):
        expected = {name: expected[name] + gradient / max(size, radius) for name, gradient in row.items()}
    harness = harness_of(network, radius=radius, allocation="equal")
    for name, released in harness.release(batch).items():
        torch.testing.assert_close(released, expected[name], rtol=1e-3, atol=1e-3)
    noise = harness.plan.noise_multiplier * sum_margin(harness.plan.expected_batch_size + 128)
    assert all(d == pytest.approx(noise, rel=1e-9) for d in harness.mechanism.deviations().values())
    harness.mechanism.close()


def test_layers_by_themselves_are_normalised_each() -> None:
    harness = harness_of("convnet", scaling="exact_layerwise", radius=1e-6, gain=1.0)
    batch = random_batch(7, harness.input_shape, CLASSES)
    expected: dict[str, Any] = dict.fromkeys(harness.mechanism.sensitivities(), 0.0)
    for row in rows_by_autograd(harness, batch):
        expected = {name: expected[name] + gradient / gradient.norm() for name, gradient in row.items()}
    for name, released in harness.release(batch).items():
        torch.testing.assert_close(released, expected[name], rtol=1e-2, atol=1e-3)
    assert set(harness.mechanism.sensitivities().values()) == {sum_margin(20 + 128)}
    harness.mechanism.close()


@pytest.mark.parametrize("scaling", ["exact", "exact_layerwise"])
def test_sums_of_micro_batches_add_and_no_sum_without_noise_is_in_grad(scaling: str) -> None:
    whole, parts = (harness_of("convnet", scaling=scaling, chunks=chunks) for chunks in (1, 3))
    batch = random_batch(10, whole.input_shape, CLASSES)
    first = whole.release(batch)
    parts.accumulate(batch)
    assert all(p.grad is None for p in parts.module.parameters())
    parts.mechanism.privatize_(0)
    for name, released in parts.gradients().items():
        torch.testing.assert_close(released, first[name], rtol=1e-4, atol=1e-6)
    for harness in (whole, parts):
        assert all(not v.any() for v in harness.release(tuple(t[:0] for t in batch), 1).values())
        harness.module(batch[0]).sum().backward()  # outside of a step: no part of the next release
        assert all(not v.any() for v in harness.release(tuple(t[:0] for t in batch), 2).values())
        harness.mechanism.close()


def test_micro_batches_that_pile_up_share_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an end to a micro-batch, norms of different examples would add; the sums tell."""
    released = []
    for chunks in (1, 2):
        harness = harness_of("mlp", chunks=chunks)
        monkeypatch.setattr(harness.mechanism, "begin_pass", lambda drawn, rows: None)
        released.append(harness.release(random_batch(8, (12,), CLASSES)))
        harness.mechanism.close()
    assert not torch.allclose(released[0]["1"], released[1]["1"], rtol=0.1)


def test_the_certificate_caps_what_noise_covers() -> None:
    """A radius above what the certificate allows costs no noise: then it is worst_case."""
    wide, worst = (
        harness_of("mlp", radius=1e3, gain=1.0),
        harness_of("mlp", scaling="worst_case", radius=None, gain=1.0),
    )
    ratio = math.hypot(*worst.mechanism.certificate.sensitivities("worst_case").values()) / 1e3
    for name, deviation in wide.mechanism.deviations().items():
        noise = wide.plan.noise_multiplier * ratio * sum_margin(wide.plan.expected_batch_size + 128)
        assert deviation == pytest.approx(noise, rel=1e-6), name
        assert deviation == pytest.approx(worst.mechanism.deviations()[name] / 1e3, rel=1e-3)
    layers = harness_of("mlp", scaling="exact_layerwise", radius=1e3, gain=1.0)
    bounds = worst.mechanism.certificate.sensitivities("worst_case")
    for name, value in layers.mechanism.sensitivities().items():
        margin = sum_margin(layers.plan.expected_batch_size + 128)
        assert value == pytest.approx(bounds[name] / 1e3 * margin, rel=1e-6)


def test_radii_that_are_tracked_follow_the_quantile_and_one_example_votes_once() -> None:
    for scaling, name in (("exact", ALL), ("exact_layerwise", "head")):
        harness = harness_of(Tied(), scaling=scaling, radius=None, radius_quantile=0.5, radius_noise_multiplier=3.0)
        chosen = harness.mechanism.scaling
        assert isinstance(chosen, Exact | ExactLayerwise) and name in chosen.state()
        batch = random_batch(10, (12,), CLASSES)
        chosen.load_state(dict.fromkeys(chosen.state(), 1e-9))
        harness.release(batch)
        assert harness.mechanism.votes is not None
        assert harness.mechanism.votes.tolist() == [-5.0] * len(chosen.state())  # whatever the uses
        chosen.load_state(dict.fromkeys(chosen.state(), 1e9))
        harness.release(batch, 1)
        assert harness.mechanism.votes.tolist() == [5.0] * len(chosen.state())
        harness.mechanism.close()


# ---- the condition, and what breaks it


class TwiceInParallel(nn.Module):
    """Both uses see the same input and cotangent: their gradients are equal, and add."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer(x)


class WithoutItsLayer(nn.Module):
    """One weight is used by an operation that measures nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.measured, self.plain = nn.Linear(12, CLASSES), nn.Parameter(torch.randn(CLASSES, 12))

    def forward(self, x: Tensor) -> Tensor:
        return self.measured(x) + nn.functional.linear(x, self.plain)


class OneUseForgotten(Exact):
    def _settle(self) -> None:
        seen: set[str] = set()
        for group, _, contribution in self._kept:
            if group in seen:
                contribution.norms = lambda views, rows=contribution.rows: torch.zeros(rows)  # type: ignore[method-assign]
            seen.add(group)
        super()._settle()


class UnmeasuredLeftOut(Exact):
    def reach(self, certificate: Any, thresholds: Any) -> float:
        return min(1.0, super().reach(certificate, thresholds))


class FactorOfTheBatch(Exact):
    def _reciprocal(self, name: str, norms: Tensor) -> Tensor:
        return super()._reciprocal(name, norms.new_full(norms.shape, float(norms.mean()) if len(norms) else 1.0))


class GroupsWithoutSquares(Exact):
    """The largest group's norm in place of the root of the sum of squares."""

    def _factors(self, norms: Any) -> dict[str, Tensor]:
        parts = torch.stack([size / self._thresholds[name] for name, size in norms.items()])
        return dict.fromkeys(norms, self._reciprocal(ALL, parts.amax(0)))


def moved(monkeypatch: pytest.MonkeyPatch, kind: type[Exact], build: Callable[[], nn.Module]) -> float:
    """How far an example moves the released sum, in units of what noise covers; squared."""
    torch.manual_seed(0)
    with monkeypatch.context() as patch:
        patch.setattr(
            mechanism_module, "scaling_of",
            lambda plan, step, certificate, views, _: kind(
                NoiseBudget.of(plan, views), Radii({ALL: plan.influence.radius.value}), plan.influence.floor
            ),
        )  # fmt: skip
        harness = harness_of(build())
        batch = random_batch(5, (12,), CLASSES, scale=0.2)
        found = 0.0
        for scale in (1.0, 0.05):
            for label in range(CLASSES):
                x = scale * torch.ones(12) / 12**0.5
                released = harness.release(with_example(batch, x, torch.tensor(label)))
                deviations = harness.mechanism.deviations()
                found = max(found, mahalanobis(released, harness.release(batch), deviations))
        harness.mechanism.close()
        return found * harness.plan.noise_multiplier**2


def mlp() -> nn.Module:
    return make_network("mlp", gain=3.0)[0]


@pytest.mark.parametrize(
    ("kind", "build"),
    [
        (OneUseForgotten, TwiceInParallel),
        (UnmeasuredLeftOut, WithoutItsLayer),
        (FactorOfTheBatch, mlp),
        (GroupsWithoutSquares, mlp),
    ],
)
def test_broken_factors_fail_the_check_that_the_exact_ones_pass(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exact], build: Callable[[], nn.Module]
) -> None:
    assert 0.2 < moved(monkeypatch, Exact, build) <= TOLERANCE
    assert moved(monkeypatch, kind, build) > 1.1


@pytest.mark.parametrize("scaling", ["exact", "exact_layerwise"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_adds_zero(scaling: str, bad: float) -> None:
    """Its cotangent is spoiled on the way back: the sum is that of the other rows, bit for bit."""
    harness = harness_of("convnet", scaling=scaling)
    head = harness.module.network[5]
    batch = random_batch(6, harness.input_shape, CLASSES)
    poison = torch.ones(6)

    def spoil(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        class Spoil(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.view_as(x)

            @staticmethod
            def backward(ctx: Any, cotangent: Tensor) -> Tensor:
                return cotangent * poison[: len(cotangent)].unsqueeze(1)

        return Spoil.apply(output)

    head.register_forward_hook(TrustedHook(spoil))
    poison[2] = 0.0
    without = harness.release(batch)
    poison[2] = bad
    with_bad = harness.release(batch, 1)
    for name, released in with_bad.items():
        assert torch.equal(released, without[name])
    harness.mechanism.close()


def test_factors_do_not_depend_on_other_examples() -> None:
    harness = harness_of("convnet")
    batch = random_batch(8, harness.input_shape, CLASSES)
    whole = harness.release(batch)
    alone = [harness.release(tuple(t[i : i + 1] for t in batch), 1 + i) for i in range(8)]
    for name, released in whole.items():
        torch.testing.assert_close(released, sum(row[name] for row in alone), rtol=1e-4, atol=1e-5)
    harness.mechanism.close()


@pytest.mark.parametrize("views", [1, 4])
def test_views_count_by_their_mean(views: int) -> None:
    """Equal views are as one; views whose gradients cancel are bounded as well."""
    plan = make_plan(max_norm=None, scaling="exact", radius=0.05)
    network, shape = make_network("convnet")
    x, y, ids = random_batch(5, shape, CLASSES)
    one = Harness(network, shape, plan)
    expected = one.release((x, y, ids))
    one.mechanism.close()
    harness = Harness(network, shape, plan, kind=partial(Noiseless, views=views))
    rows = [t.repeat_interleave(views, 0) for t in (x, y, ids)]
    harness.module._views = lambda *batch: batch[:3]  # the rows are views already
    for name, released in harness.release(tuple(rows)).items():
        torch.testing.assert_close(released, expected[name], rtol=1e-4, atol=1e-5)
    for i in range(5):
        rows[1] = torch.randint(CLASSES, rows[1].shape)
        own = harness.release(tuple(t[i * views : (i + 1) * views] for t in rows), 1 + i)
        nothing = {name: torch.zeros_like(v) for name, v in own.items()}
        assert 0.9 < mahalanobis(own, nothing, harness.mechanism.deviations()) * plan.noise_multiplier**2 <= TOLERANCE
    harness.mechanism.close()


def test_a_large_batch_of_cancelling_positions_stays_within_the_margin() -> None:
    """4096 equal examples whose parts are many times their gradient: the sum is rounded at its own size."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, CLASSES))
    with torch.no_grad():
        head = network[2].weight.view(CLASSES, 4, 36)
        head -= head.mean(2, keepdim=True)
        head += 0.01 * torch.randn_like(head)
    plan = make_plan(dataset_size=100_000, expected_batch_size=4096, scaling="exact", radius=1e-3, max_norm=None)
    harness = Harness(network, (1, 8, 8), plan)
    x, y = torch.ones(1, 1, 8, 8) / 8, torch.zeros(1, dtype=torch.long)
    batch = (x.repeat(4096, 1, 1, 1), y.repeat(4096), torch.arange(4096))
    without = harness.release(batch)
    both = harness.release(with_example(batch, x[0], y[0]))
    shift = mahalanobis(both, without, harness.mechanism.deviations()) * plan.noise_multiplier**2
    assert 0.95 <= shift <= 1.0
    harness.mechanism.close()


def test_uses_that_no_layer_measures_come_on_top() -> None:
    harness = harness_of(Branched(), gain=1.0)
    certificate = harness.mechanism.certificate
    (plain,) = [u for g in certificate.groups for u in g.uses if not u.scalable]
    expected = 1 + plain.cotangent_bound * plain.gradient_factor
    reach = harness.mechanism.scaling.reach(certificate, harness.mechanism.numbers().thresholds)
    assert reach == pytest.approx(expected)
    layers = harness_of(Branched(), gain=1.0, scaling="exact_layerwise").mechanism
    assert layers.scaling.bounds(certificate)["plain"] == pytest.approx(plain.cotangent_bound * plain.gradient_factor)


class WithItsOwnForward(ScaledLinear):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight, self.bias)


@pytest.mark.parametrize("scaling", ["exact", "exact_layerwise"])
def test_a_layer_that_keeps_its_gradient_to_itself_is_refused(scaling: str) -> None:
    """The certificate counts on the keeper of every scaled layer."""
    with pytest.raises(ValueError, match=r"WithItsOwnForward.*HINT"):
        harness_of(nn.Sequential(WithItsOwnForward(12, CLASSES)), scaling=scaling)


def test_the_cotangent_passed_on_is_not_scaled() -> None:
    """Measured are the gradients of the loss itself, whatever the layers behind were scaled by."""
    harness = harness_of("convnet", radius=1e-6)
    seen: list[Tensor] = []

    class Seen(torch.autograd.Function):  # a hook on a tensor would be one that is attached within a step
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, cotangent: Tensor) -> Tensor:
            seen.append(cotangent.clone())
            return cotangent

    harness.module.network[0].register_forward_hook(TrustedHook(lambda layer, args, output: Seen.apply(output)))
    batch = random_batch(4, harness.input_shape, CLASSES)
    harness.release(batch)
    harness.mechanism.scaling.detach(harness.module.network)
    harness.module.loss.per_example(harness.module(batch[0]), batch[1]).sum().backward()
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-5, atol=1e-7)
