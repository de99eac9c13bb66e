"""Projection of a whole model after each step: lipdp_lightning/mechanism/projection.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from private_step import Harness, Tied, make_network, make_plan, mlp, random_batch
from torch import nn

from lipdp_lightning import norm_balls
from lipdp_lightning.mechanism.step import Mechanism
from lipdp_lightning.norms import conv_norm, dense_norm
from lipdp_lightning.norms.operators import Operator


def harness_of(network: str = "convnet", **plan: Any) -> Harness:
    built, shape = make_network(network, gain=5.0)
    return Harness(built, shape, make_plan(**plan))


def certified(layer: nn.Module, size: tuple[int, int] | None = None) -> float:
    if isinstance(layer, nn.Linear):
        return dense_norm(layer.weight)
    return conv_norm(
        layer.weight, stride=layer.stride, padding=layer.padding, dilation=layer.dilation, groups=layer.groups,
        padding_mode=layer.padding_mode, input_size=size,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["clip", "clip_singular", "fixed", "bjorck", "frobenius"])
def test_every_layer_is_within_its_radius_after_steps_of_noise(kind: str) -> None:
    harness = harness_of(projection=kind, max_norm=0.9, noise_multiplier=2.0)
    optimizer = torch.optim.SGD(harness.module.parameters(), 0.5)
    network = harness.module.network
    for step in range(4):
        harness.release(random_batch(8, harness.input_shape, 5), step)
        with torch.no_grad():  # a step that leaves every ball
            for parameter in network.parameters():
                parameter.add_(torch.randn_like(parameter))
        optimizer.step()
        harness.mechanism.project_()
        kappas = {0: 2.0, 2: 3.0} if kind in ("bjorck", "frobenius") else {}  # these bound the reshaped kernel
        for index, size in ((0, (8, 8)), (2, (4, 4)), (5, None)):
            assert certified(network[index], size) <= 0.9 * kappas.get(index, 1.0) * (1 + 1e-6)
        norms = harness.mechanism.boundary()
        assert set(norms) == {"0", "2", "5"} and all(limit == 0.9 for _, limit in norms.values())
    harness.mechanism.close()


class Errs(norm_balls.Fixed):
    """Leaves another weight than it should, and returns a norm that is too small."""

    @torch.no_grad()
    def apply_(self, weight: torch.Tensor, operator: Operator) -> float:
        weight.mul_(1.01).add_(0.01)
        return 1e-3


def test_bounds_do_not_rely_on_a_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_balls, "KINDS", {**norm_balls.KINDS, "fixed": Errs})
    harness = harness_of(projection="fixed", max_norm=0.9)
    network = harness.module.network
    for _ in range(3):
        harness.mechanism.project_()
        certificate = harness.mechanism.refresh_certificate()
        lipschitz = {use.module: use.lipschitz for group in certificate.groups for use in group.uses}
        for index, size in ((0, (8, 8)), (2, (4, 4)), (5, None)):
            norm, _ = harness.mechanism.boundary()[str(index)]
            assert min(norm, lipschitz[f"{index}"]) >= certified(network[index], size) * (1 - 1e-9) > 0.9
    harness.mechanism.close()


def test_fixed_reaches_the_radius_and_clip_leaves_what_is_inside() -> None:
    for kind, expected in (("fixed", 0.9), ("clip", 0.3)):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
        with torch.no_grad():
            network[1].weight.mul_(0.3 / dense_norm(network[1].weight))
        Harness(network, (12,), make_plan(projection=kind, max_norm=0.9))
        assert dense_norm(network[1].weight) == pytest.approx(expected, rel=1e-3)


def test_initial_weights_are_projected_and_biases_are_not() -> None:
    torch.manual_seed(0)
    network = mlp()
    with torch.no_grad():
        network[3].weight.mul_(100)
        network[3].bias.fill_(50)
    harness = Harness(network, (12,), make_plan(max_norm=1.0))
    assert dense_norm(network[3].weight) <= 1.0
    assert torch.equal(network[3].bias, torch.full((10,), 50.0))
    assert harness.mechanism.boundary()["3"][0] <= 1.0 + 1e-6
    harness.mechanism.close()


def test_free_layers_and_radii_by_pattern() -> None:
    harness = harness_of("mlp", max_norm=[["1", 0.5], ["*", 2.0]], free_layers=["5"])
    norms = harness.mechanism.boundary()
    assert {name: limit for name, (_, limit) in norms.items()} == {"1": 0.5, "3": 2.0, "5": None}
    network = harness.module.network
    assert dense_norm(network[1].weight) <= 0.5 and dense_norm(network[3].weight) <= 2.0
    assert dense_norm(network[5].weight) > 2.0
    # without a radius every layer is free
    free = harness_of("mlp", max_norm=None)
    before = [p.detach().clone() for p in free.module.parameters()]
    free.mechanism.project_()
    assert all(torch.equal(a, b) for a, b in zip(before, free.module.parameters(), strict=True))
    with pytest.raises(ValueError, match="matches no layer"):
        harness_of("mlp", max_norm=[["convolution*", 0.5], ["*", 1.0]])
    for max_norm in (None, 1.0, [["*", 1.0]]):
        with pytest.raises(ValueError, match=r"'head' matches no layer.\nHINT: the layers are \['1', '3', '5'\]"):
            harness_of("mlp", max_norm=max_norm, free_layers=["head"])


def test_frozen_layers_are_left_alone() -> None:
    torch.manual_seed(0)
    network = mlp()
    with torch.no_grad():
        network[1].weight.mul_(10)
    network[1].weight.requires_grad_(False)
    before = network[1].weight.detach().clone()
    harness = Harness(network, (12,), make_plan(max_norm=0.5))
    assert torch.equal(network[1].weight, before) and "1" not in harness.mechanism.boundary()


@pytest.mark.parametrize("kind", ["clip", "frobenius"])
def test_shared_weights_are_projected_once_and_the_certificate_is_of_what_is_stored(kind: str) -> None:
    torch.manual_seed(0)
    network = Tied()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(6)
    harness = Harness(network, (12,), make_plan(projection=kind, max_norm=0.8), kind=Mechanism)
    for layer in (network.inner, network.first, network.second, network.head):
        assert dense_norm(layer.weight) <= 0.8
    assert network.first.weight is network.second.weight
    bounds = {n.operation: n.lipschitz[0] for n in harness.mechanism.refresh_certificate().nodes if n.lipschitz}
    for path in ("inner", "first", "second", "head"):
        exact = dense_norm(network.get_submodule(path).weight)
        assert exact * (1 - 1e-6) <= bounds[path] <= 1.06 * exact
    harness.mechanism.close()


def test_one_kernel_at_two_sizes_stays_covered_by_the_certificate() -> None:
    """Its two operators have two norms, both of which are projected and certified as they are."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool, self.head = nn.Conv2d(2, 2, 3, padding=1), nn.AvgPool2d(2), nn.Linear(32, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.conv(self.pool(torch.relu(self.conv(x)))).flatten(1))

    torch.manual_seed(0)
    network = Twice()
    with torch.no_grad():
        network.conv.weight.mul_(8)
    harness = Harness(network, (2, 8, 8), make_plan(max_norm=0.7))
    certificate = harness.mechanism.refresh_certificate()
    bounds = [n.lipschitz[0] for n in certificate.nodes if n.operation == "conv"]
    exact = [certified(network.conv, size) for size in ((8, 8), (4, 4))]
    assert max(exact) <= 0.7
    assert all(e <= b * (1 + 1e-9) for e, b in zip(exact, bounds, strict=True))
    harness.mechanism.close()


def grouped(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels of each group, before and after the projection of a convolution in four groups, as (4, 4, 2)."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(8, 16, 1, groups=4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    with torch.no_grad():
        network[0].weight.mul_(4.0)
    before = network[0].weight.detach().double().reshape(4, 4, 2)
    Harness(network, (8, 2, 2), make_plan(projection=kind, max_norm=1.0))
    return before, network[0].weight.detach().double().reshape(4, 4, 2)


def test_singular_values_of_a_grouped_kernel_are_cut_group_by_group() -> None:
    """All groups as one matrix would be cut to half of that: its singular values are those of the groups together."""
    before, after = grouped("clip_singular")
    left, values, right = torch.linalg.svd(before, full_matrices=False)
    assert (values > 1).any() and torch.allclose(
        after, (left * values.clamp_max(1)[:, None, :]) @ right, rtol=1e-5, atol=1e-5
    )


def test_bjorck_orthogonalises_every_group_of_a_kernel_by_itself() -> None:
    _, after = grouped("bjorck")
    values = torch.linalg.svdvals(after)
    assert values.max() <= 1 and values[:, 0].min() > 0.95
    assert torch.linalg.svdvals(after.reshape(16, 2)).max() > 1.5, "the groups were taken as one matrix"
