"""Writes in place on memory that something else reads: found by trying, whatever made the memory shared."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rule_checks import Forward
from torch import Tensor, nn

from lipdp_lightning.bounds import Bound, CertificationError, certify, rule
from lipdp_lightning.layers import CotangentClip, FrozenFeatures, KeyedDropout, Residual

# every one may return memory of what it is given, some of them only in some layouts, modes or dtypes
VIEWS: dict[str, Callable[[Any, Tensor], Any]] = {
    "moveaxis": lambda m, y: y.moveaxis(1, 2), "torch.moveaxis": lambda m, y: torch.moveaxis(y, 1, 2),
    "movedim": lambda m, y: torch.movedim(y, 1, 2), "swapaxes": lambda m, y: y.swapaxes(1, 2),
    "transpose": lambda m, y: torch.transpose(y, 2, 1), "permute": lambda m, y: y.permute(0, 2, 1),
    "view": lambda m, y: y.view(-1, 12), "reshape": lambda m, y: y.reshape(y.shape[0], 12),
    "torch.reshape": lambda m, y: torch.reshape(y, (-1, 12)), "flatten": lambda m, y: y.flatten(1),
    "nn.Flatten": lambda m, y: m.flatten(y), "nn.Unflatten": lambda m, y: m.unflatten(y),
    "reshape of a transpose": lambda m, y: y.transpose(1, 2).reshape(-1, 12),
    "contiguous": lambda m, y: y.contiguous(), "contiguous transpose": lambda m, y: y.transpose(1, 2).contiguous(),
    "to": lambda m, y: y.to(y.dtype), "to dtype": lambda m, y: y.to(torch.float64), "double": lambda m, y: y.double(),
    "expand": lambda m, y: y.expand(-1, 4, 3), "positive": lambda m, y: +y, "detach": lambda m, y: y.detach(),
    "torch.detach": lambda m, y: torch.detach(y),
    "unsqueeze": lambda m, y: y.unsqueeze(1), "squeeze": lambda m, y: y.unsqueeze(1).squeeze(1),
    "squeeze of nothing": lambda m, y: y.squeeze(1), "chunk": lambda m, y: y.chunk(2, 1)[0],
    "split": lambda m, y: torch.split(y, 2, 1)[1], "unbind": lambda m, y: y.unbind(1)[0],
    "tensor_split": lambda m, y: y.tensor_split(2, 1)[-1], "slice": lambda m, y: y[:, 1:], "whole": lambda m, y: y[...],
    "new dimension": lambda m, y: y[:, None], "identity": lambda m, y: m.identity(y),
    "dropout": lambda m, y: m.dropout(y), "keyed dropout": lambda m, y: m.keyed(y),
    "dropout of nothing": lambda m, y: m.never(y), "clip": lambda m, y: m.clip(y),
    "a user's function": lambda m, y: itself(y), "a user's module": lambda m, y: m.sometimes(y),
    "a subclass": lambda m, y: m.named(y),
}  # fmt: skip

WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "method": lambda m, z: z.mul_(3.0),
    "function": lambda m, z: torch.relu_(z),
    "keyword": lambda m, z: torch.tanh_(input=z),
    "augmented": lambda m, z: operator.isub(z, 2.0),
    "inplace": lambda m, z: F.leaky_relu(z, 3.0, True),
    "module": lambda m, z: m.act(z),
    "a user's own": lambda m, z: m.overwrites(z),
    "inside frozen features": lambda m, z: m.features(z),
}


def itself(y: Tensor) -> Tensor:
    return y


torch.fx.wrap("itself")


@rule(itself)
def itself_rule(op: Any, y: Any) -> Bound:
    return Bound(y.norm, 1.0)


class Sometimes(nn.Module):
    """Returns what it is given, or a copy of it, by a switch that no trial knows."""

    copies = True

    def forward(self, y: Tensor) -> Tensor:
        return y.clone() if self.copies else y


@rule(Sometimes)
def sometimes_rule(op: Any, y: Any) -> Bound:
    return Bound(y.norm, 1.0)


class Overwrites(nn.Module):
    """Writes in place, and neither its name nor an option says so."""

    def forward(self, y: Tensor) -> Tensor:
        return y.mul_(0.5)


@rule(Overwrites)
def overwrites_rule(op: Any, y: Any) -> Bound:
    return Bound(y.norm, 1.0)


class Named(nn.Identity):
    """Computes what its parent computes."""


def model_of(function: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    model: Any = Forward(function)
    model.flatten, model.unflatten, model.identity = nn.Flatten(), nn.Unflatten(1, (2, 2)), nn.Identity()
    model.dropout, model.keyed, model.never = nn.Dropout(0.5), KeyedDropout(0.5), KeyedDropout(0.0)
    model.clip, model.sometimes = CotangentClip(1.0), Sometimes()
    model.named, model.act, model.overwrites = Named(), nn.LeakyReLU(3.0, inplace=True), Overwrites()
    model.features = FrozenFeatures(nn.Sequential(nn.Flatten(), nn.LeakyReLU(3.0, inplace=True)).eval())
    model.layer, model.residual = nn.Linear(3, 3), Residual(nn.Tanh())
    return model.double()


def certified(function: Callable[[Any, Tensor], Tensor]) -> None:
    certify(model_of(function), (4, 3), 1.0, "binary_cross_entropy", compute_dtype=torch.float64)


@pytest.mark.parametrize("view", VIEWS)
def test_a_write_through_a_view_is_refused(view: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        z = VIEWS[view](m, y)
        z.mul_(3.0)
        return y + 1.0

    with pytest.raises(CertificationError, match="in place") as refused:
        certified(forward)
    assert "HINT" in str(refused.value)


@pytest.mark.parametrize("view", VIEWS)
def test_a_write_on_what_a_view_shows_is_refused(view: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        z = VIEWS[view](m, y)
        y.mul_(3.0)
        return z + 1.0

    with pytest.raises(CertificationError, match="in place"):
        certified(forward)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", ["moveaxis", "slice", "contiguous"])
def test_every_way_to_write_is_seen(write: str, view: str) -> None:
    def through(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        WRITES[write](m, VIEWS[view](m, y))
        return y + 1.0

    def directly(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        WRITES[write](m, y)
        return VIEWS[view](m, y) + 1.0

    def on_the_input(m: Any, x: Tensor) -> Tensor:
        WRITES[write](m, VIEWS[view](m, x))
        return m.layer(x)

    for forward in (through, directly, on_the_input):
        with pytest.raises(CertificationError, match="in place"):
            certified(forward)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: (torch.tanh(m.layer(x), out=m.store), m.layer(x) + m.store)[1],
        lambda m, x: torch.abs(x, out=m.store),
        lambda m, x: torch.mean(x, 1, out=m.store),
        lambda m, x: torch.sum(x, 1, out=m.store),
        lambda m, x: torch.softmax(x, 1, out=m.store),
        lambda m, x: torch.add(x, x, out=m.store),
        lambda m, x: torch.add(x, 1.0, out=torch.tanh(x)),
        lambda m, x: (operator.setitem(m.layer(x), 0, 1.0), m.layer(x))[1],
        lambda m, x: (lambda y: (y.data.mul_(3.0), y + 1.0)[1])(m.layer(x)),
        lambda m, x: (lambda y: (y.copy_(3.0 * y), y + 1.0)[1])(m.layer(x)),
        lambda m, x: (lambda y: (y.zero_(), y + 1.0)[1])(m.layer(x)),
        lambda m, x: (lambda y: (torch.Tensor.__imul__(y, 3.0), y + 1.0)[1])(m.layer(x)),
        lambda m, x: (lambda y: torch.cat([y, y.mul_(3.0)], 1))(m.layer(x)),
        lambda m, x: (lambda y: (lambda z: (z.mul_(3.0), y.mul_(2.0))[1])(y.moveaxis(1, 2)))(m.layer(x)),
    ],
)
def test_other_ways_to_write_are_refused(function: Callable[[Any, Tensor], Tensor]) -> None:
    def with_store(m: Any, x: Tensor) -> Tensor:
        return function(m, x)

    model: Any = model_of(with_store)
    model.register_buffer("store", torch.zeros(3, 4, 3, dtype=torch.float64))
    before = model.store.clone()
    with pytest.raises(CertificationError) as refused:
        certify(model, (4, 3), 1.0, "binary_cross_entropy", compute_dtype=torch.float64)
    assert "HINT" in str(refused.value)
    assert torch.equal(model.store, before)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.act(m.layer(x)),
        lambda m, x: m.layer(x).flatten(1).mul_(3.0),
        lambda m, x: m.act(m.layer(x).view(-1, 12)),
        lambda m, x: operator.iadd(m.layer(x), x).relu_(),
        lambda m, x: (lambda y: operator.iadd(m.layer(y), y).mul_(2.0) + y)(m.layer(x)),
        lambda m, x: (lambda y: (2.0 * y).mul_(3.0) + y)(m.layer(x)),
        lambda m, x: (lambda y: y.flip(1).relu_() + y)(m.layer(x)),
        lambda m, x: (lambda y: y.transpose(1, 2).clone().relu_() + y.transpose(1, 2))(m.layer(x)),
        lambda m, x: m.layer(x).view(operator.iadd(x.shape[:2], x.shape[2:])) * (x.shape[1] + x.shape[2]),
        lambda m, x: m.residual(m.layer(x)).relu_(),
    ],
)
def test_writes_that_nothing_else_sees_are_certified(function: Callable[[Any, Tensor], Tensor]) -> None:
    certified(function)


def test_a_view_in_another_memory_layout_is_found() -> None:
    """On an image with its channels last in memory, this copies nothing; in the usual layout it does."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        y.contiguous(memory_format=torch.channels_last).mul_(3.0)
        return y + 1.0

    x = torch.zeros(2, 2, 4, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
    assert not torch.equal(forward(model_of(forward), x), model_of(forward).layer(x) + 1.0)
    with pytest.raises(CertificationError, match="in place"):
        certify(model_of(forward), (2, 4, 3), 1.0, "binary_cross_entropy", compute_dtype=torch.float64)
