"""What a model holds is looked up anew whenever it holds something else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lipdp_lightning.bounds.held import HeldTensors


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
    held = HeldTensors(model)
    assert list(held.named()) == [*dict(model.named_parameters()), *dict(model.named_buffers())]
    CHANGES[change](model)
    expected = dict(model.named_parameters()) | dict(model.named_buffers())
    assert {name: id(t) for name, t in held.named().items()} == {name: id(t) for name, t in expected.items()}
    assert {id(p) for p in held.named_parameters().values()} == {id(p) for p in model.parameters()}
    parameters, modules = held.parameters_and_modules()
    assert {id(p) for p in parameters} >= {id(p) for p in model.parameters()}
    assert list(map(id, modules)) == list(map(id, model.modules()))


def test_nothing_is_looked_up_twice_without_a_change() -> None:
    held = HeldTensors(network())
    assert held.named() is held.named()
    assert held.parameters_and_modules()[1] is held.parameters_and_modules()[1]
