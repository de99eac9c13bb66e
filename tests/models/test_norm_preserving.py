"""Gradient-norm-preserving networks (paper 001, section 3.1): no layer shortens a cotangent, trained or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from private_step import Harness, make_plan, random_batch
from torch import Tensor, nn

from lipdp_lightning.layers import GroupSort, MaxMin
from lipdp_lightning.models import MLP, NormPreservingConvNet, NormPreservingMLP

SHAPE = (1, 8, 8)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: NormPreservingMLP(SHAPE, 10, (64, 32, 16)),
    "groups of four": lambda: NormPreservingMLP(SHAPE, 10, (32,), 4),
    "convnet": lambda: NormPreservingConvNet(SHAPE, 10, (4, 16), (2, 2), hidden=(32,)),
    "convnet with pooling": lambda: NormPreservingConvNet(SHAPE, 10, (4, 16), (2, 2), pool=2),
}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield


def shortest(network: nn.Module) -> float:
    """The smallest ||cotangent at the input|| / ||cotangent at the logits|| over random examples."""
    x: Tensor = random_batch(64, SHAPE, 10)[0].requires_grad_()
    d = torch.randn(64, 10)
    (pulled,) = torch.autograd.grad(network(x), x, d)
    return float((pulled.flatten(1).norm(dim=1) / d.norm(dim=1)).min())


def trained(network: nn.Module, projection: str) -> Harness:
    """Steps of a private optimizer, large enough to leave the orthogonal matrices without the projection."""
    harness = Harness(network, SHAPE, make_plan(projection=projection, max_norm=1.0))
    optimizer = torch.optim.SGD(harness.module.network.parameters(), 0.3)
    for step in range(3):
        harness.release(random_batch(30, SHAPE, 10, seed=step), step)
        optimizer.step()
        harness.mechanism.project_()
    return harness


@pytest.mark.parametrize("name", NETWORKS)
def test_cotangents_keep_their_norm_through_training(name: str) -> None:
    network = NETWORKS[name]()
    assert shortest(network) > 1 - 1e-4
    harness = trained(network, "bjorck")
    assert shortest(harness.module.network) > 1 - 1e-3
    certificate = harness.mechanism.refresh_certificate()
    assert all(n.cotangent <= 2**0.5 * (1 + 1e-4) for n in certificate.nodes if n.name != "x")
    loose = trained(NETWORKS[name](), "clip")
    assert shortest(loose.module.network) < 0.98


@pytest.mark.parametrize("broken", ["relu", "plain layers"])
def test_the_measure_sees_what_does_not_preserve(broken: str) -> None:
    network = NETWORKS["mlp"]()
    if broken == "relu":
        for i, layer in enumerate(network.layers):
            if isinstance(layer, GroupSort):
                network.layers[i] = nn.ReLU()
    else:
        network = MLP(SHAPE, 10, (64, 32, 16))
        assert any(isinstance(m, MaxMin) for m in network.modules())
    assert shortest(network) < 0.9


@pytest.mark.parametrize(
    "build",
    [
        lambda: NormPreservingMLP((8,), 4, (16,)),
        lambda: NormPreservingMLP((8,), 4, (5,)),
        lambda: NormPreservingMLP((8,), 9, ()),
        lambda: NormPreservingConvNet(SHAPE, 10, (8, 16), (2, 2)),
        lambda: NormPreservingConvNet(SHAPE, 10, (4, 16), (2,)),
    ],
)
def test_widths_that_cannot_preserve_norms_are_refused(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match="HINT"):
        build()
