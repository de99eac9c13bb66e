"""A network that holds other tensors or modules than it did is another network."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lipdp_lightning.bounds.identity import NetworkIdentity


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def _move_the_bias(model: nn.Sequential) -> None:
    """The identities of what is held stay the same, in the same order; the modules that hold them do not."""
    bias = model[0].bias
    model[0].bias = None
    del model[1][0]._parameters["weight"], model[1][0]._parameters["bias"]
    model[1][0].register_parameter("weight", bias)


def _freeze_as_a_buffer(model: nn.Sequential) -> None:
    weight = model[0].weight
    del model[0].weight
    model[0].register_buffer("weight", weight)


CHANGES: dict[str, Callable[[nn.Sequential], None]] = {
    "another parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(3, 3))),
    "tied": lambda m: setattr(m[0], "weight", m[1][0].weight),
    "none": lambda m: setattr(m[0], "bias", None),
    "exchanged": lambda m: m[0]._parameters.update(weight=m[0].bias, bias=m[0].weight),
    "a buffer": lambda m: m[0].register_buffer("mask", torch.ones(3)),
    "a module": lambda m: m[1].append(nn.Linear(3, 2)),
    "another module": lambda m: m.__setitem__(0, nn.Linear(3, 3)),
    "statistics": lambda m: setattr(m[1][1], "running_mean", torch.ones(3)),
    "moved": _move_the_bias,
    "a parameter as a buffer": _freeze_as_a_buffer,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_is_held_is_seen(change: str) -> None:
    model = network()
    identity = NetworkIdentity.of(model)
    assert identity.differences() == []
    CHANGES[change](model)
    assert identity.differences()
    assert NetworkIdentity.of(model).differences() == []
