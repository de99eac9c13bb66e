"""Entries that are read several times: in bfloat16, each addition of their cotangents is rounded, and is paid for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lipdp_lightning.bounds.certifier import certify
from lipdp_lightning.layers import make_private

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "max 3, stride 1": lambda: nn.MaxPool2d(3, 1, 1),
    "max 5, stride 1": lambda: nn.MaxPool2d(5, 1, 2),
    "max 5, stride 2": lambda: nn.MaxPool2d(5, 2, 2),
    "average 3, stride 1": lambda: nn.AvgPool2d(3, 1, 1),
    "average 5, stride 1": lambda: nn.AvgPool2d(5, 1, 2),
    "adaptive average": lambda: nn.AdaptiveAvgPool2d(11),
    "adaptive max": lambda: nn.AdaptiveMaxPool2d(11),
    "copies of the edge": lambda: nn.ReplicationPad2d(7),
    "reflection": lambda: nn.ReflectionPad2d(7),
    "circular": lambda: nn.CircularPad2d(7),
}


def growth(layer: nn.Module, cotangents: Callable[[Tensor], Tensor]) -> float:
    """How much longer the cotangent of the input may be than that of the output, in bfloat16."""
    x = torch.zeros(1, 1, 16, 16, dtype=torch.bfloat16)
    x[0, 0, 8, 8] = 1
    worst = 0.0
    for mantissa in range(128):
        given = x.clone().requires_grad_()
        output = layer(given)
        d = (1 + mantissa / 128) * cotangents(output.detach().float())
        output.backward(d.bfloat16())
        assert given.grad is not None
        worst = max(worst, (given.grad.double().norm() / d.bfloat16().double().norm()).item())
    return worst


@pytest.mark.parametrize("name", LAYERS)
def test_the_rounding_of_repeated_reads_is_paid_for(name: str) -> None:
    layer = LAYERS[name]()
    entries = layer(torch.zeros(1, 1, 16, 16)).numel()
    network = make_private(nn.Sequential(layer, nn.Flatten(), nn.Linear(entries, 2)))
    certificate = certify(network, (1, 16, 16), 1.0, "hinge", compute_dtype=torch.bfloat16)
    bound = next(node.lipschitz[0] for node in certificate.nodes if node.operation == "0")
    assert growth(layer, torch.ones_like) <= bound
    assert growth(layer, lambda output: (output == output.max()).float()) <= bound
