"""Changes in mid-run below and beside a network: its layers' classes, torch's functions, the loss, nodes of a graph."""

from __future__ import annotations

import argparse
import ctypes
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from private_step import Harness, make_plan, random_batch
from torch import Tensor, nn

from lipdp_lightning.bounds import losses
from lipdp_lightning.bounds.certifier import CertificationError
from lipdp_lightning.layers import LayerNorm, MaxMin
from lipdp_lightning.layers import scaled as scaled_layers

REFUSALS = (ValueError, CertificationError, AssertionError)
BATCH = random_batch(9, (4,), 3)


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


def by_default(x: Any, gain: Tensor = torch.ones(6)) -> Any:  # noqa: B008
    return x * gain


def by_keyword(x: Any, *, gain: Any = (1.0,)) -> Any:
    return x * gain[0]


def closing_over(gain: float) -> Callable[[Any], Any]:
    def scaled(x: Any) -> Any:
        return x * gain

    return scaled


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.inner = nn.Sequential(nn.LeakyReLU(0.5), MaxMin(), LayerNorm(0.5), nn.Identity())
        self.tied = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.tied.weight
        self.parts = nn.ModuleDict({"a": nn.Tanh(), "b": nn.ReLU()})
        self.rows = nn.ModuleList([nn.Softplus()])
        self.register_buffer("mask", torch.ones(6))
        self.options, self.slotted, self.number = argparse.Namespace(gain=1.0), Slotted(), ctypes.c_double(1.0)
        self.array, self.boxes = np.ones(4), np.array([[1.0], None], dtype=object)
        self.closed = closing_over(1.0)
        self.normal = torch.distributions.Normal(0.0, 1.0)

    @property
    def gain(self) -> Tensor:
        return self.mask

    def forward(self, x: Any) -> Any:
        x = self.inner(self.first(x) * self.gain) * self.options.gain * self.slotted.gain * self.number.value
        x = self.rows[0](self.parts["a"](x)) * (1.0 if self.array.ndim == 1 else 100.0) * self.boxes[0][0]
        x = self.closed(by_keyword(by_default(x))) * getattr(self._buffers["mask"], "gain", 1.0)
        return self.last(self.again(self.tied(x * self.normal.stddev)))


def harness_of(scaling: str = "joint") -> Harness:
    torch.manual_seed(0)
    return Harness(Network(), (4,), make_plan(scaling=scaling, max_norm=None))


ADDED: list[tuple[Any, str]] = []


def put(thing: Any, name: str, value: Any) -> None:
    """Sets an attribute of a class or a module, to be restored."""
    ADDED.append((thing, name))
    KEPT.setdefault((id(thing), name), vars(thing).get(name, KEPT))
    setattr(thing, name, value)


KEPT: dict[Any, Any] = {}


@contextmanager
def restored() -> Iterator[None]:
    codes = [(f, f.__code__) for f in (F.leaky_relu, F.relu, losses.CrossEntropy.per_example)]
    default = by_default.__defaults__[0].clone()
    try:
        yield
    finally:
        for thing, name in ADDED:
            before = KEPT[id(thing), name]
            if before is KEPT:
                if name in vars(thing):
                    delattr(thing, name)
            else:
                setattr(thing, name, before)
        ADDED.clear()
        KEPT.clear()
        for function, code in codes:
            if hasattr(function, "__code__"):
                function.__code__ = code
        by_default.__defaults__[0].copy_(default)
        by_keyword.__kwdefaults__["gain"] = (1.0,)
        torch.set_default_dtype(torch.float32)


def loud(self: Any, *args: Any, **kwargs: Any) -> Any:
    return 100 * nn.Module._call_impl(self, *args, **kwargs)


def _untied(n: Any) -> None:
    n.again.weight = nn.Parameter(n.again.weight.detach().clone())


def _tied(n: Any) -> None:
    n.tied.bias = n.again.bias


def _exchanged_values(n: Any) -> None:
    torch.utils.swap_tensors(n.first.weight, nn.Parameter(100 * n.first.weight.detach()))


def _loud_parametrization(n: Any) -> None:
    class Loud(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 100 * x

    torch.nn.utils.parametrize.register_parametrization(n.last, "weight", Loud(), unsafe=True)


def _weights_of_others(n: Any) -> None:
    n.last.__dict__["weight"] = 100 * n.last.weight.detach()


def _node_hook(n: Any) -> None:
    weight = n.first.weight
    weight.view_as(weight).grad_fn.register_hook(lambda *a: None)


EDITS: dict[str, Callable[[Any], Any]] = {
    # classes of layers, with names that they did not have
    "call of a class of layers": lambda n: put(type(n.first), "__call__", loud),
    "call of a class of torch": lambda n: put(nn.LeakyReLU, "__call__", loud),
    "call implementation of a class": lambda n: put(nn.LeakyReLU, "_call_impl", loud),
    "getattribute of all modules": lambda n: put(nn.Module, "__getattribute__", lambda s, k: object.__getattribute__(s, k)),  # noqa: E501
    "getattr of a class": lambda n: put(nn.LeakyReLU, "__getattr__", nn.Module.__getattr__),
    "property in place of an attribute": lambda n: put(nn.LeakyReLU, "negative_slope", property(lambda s: 100.0)),
    "property of a layer of the library": lambda n: put(type(n.first), "weight", property(lambda s: 100 * s._parameters["weight"])),  # noqa: E501
    "property of an identity": lambda n: put(nn.Identity, "forward", lambda s, x: 100 * x),
    "forward of a class of torch": lambda n: put(nn.Softplus, "forward", lambda s, x: 100 * x),
    "forward of all linear layers": lambda n: put(nn.Linear, "forward", lambda s, x: 100 * F.linear(x, s.weight, s.bias)),  # noqa: E501
    "forward of the library's layers": lambda n: put(scaled_layers.ScaledLinear, "forward", lambda s, x: 100 * F.linear(x, s.weight, s.bias)),  # noqa: E501
    "forward by a method": lambda n: setattr(n.first, "forward", types.MethodType(lambda s, x: 100 * x, n.first)),
    "getitem of a container": lambda n: put(nn.ModuleDict, "__getitem__", lambda s, k: s._modules["b"]),
    "class of parameters": lambda n: put(nn.Parameter, "__torch_function__", classmethod(lambda c, f, t, a=(), k=None: 100 * f(*a))),  # noqa: E501
    # functions that layers call
    "function of torch": lambda n: put(F, "leaky_relu", lambda *a, **k: 100 * torch.ones(6)),
    "code of a function of torch": lambda n: setattr(F.leaky_relu, "__code__", (lambda input, negative_slope=0.01, inplace=False: 100 * input).__code__),  # noqa: E501
    "builtin of torch": lambda n: put(F, "softplus", lambda *a: 100 * a[0]),
    "code of the loss": lambda n: setattr(losses.CrossEntropy.per_example, "__code__", (lambda self, logits, target: 100 * logits.sum(1)).__code__),  # noqa: E501
    "loss of the class": lambda n: put(losses.CrossEntropy, "per_example", lambda s, o, y: 100 * o.sum(1)),
    "constant of the loss's class": lambda n: put(losses.CrossEntropy, "lipschitz", lambda s, shape: 1e-3),
    "function that the loss calls": lambda n: put(F, "cross_entropy", lambda o, y, **k: 100 * o.sum(1)),
    # parametrizations and hooks of torch, late
    "parametrization": _loud_parametrization,
    "weight norm": lambda n: torch.nn.utils.weight_norm(n.last),
    "spectral norm": lambda n: torch.nn.utils.spectral_norm(n.last),
    "weight norm by a parametrization": lambda n: torch.nn.utils.parametrizations.weight_norm(n.last),
    "orthogonal by a parametrization": lambda n: torch.nn.utils.parametrizations.orthogonal(n.tied),
    "pruning": lambda n: torch.nn.utils.prune.l1_unstructured(n.last, "weight", 0.5),
    "hook before state is loaded": lambda n: n.register_load_state_dict_pre_hook(lambda *a: None),
    # modules
    "parameter registered": lambda n: n.register_parameter("more", nn.Parameter(torch.ones(3))),
    "parameter registered as None": lambda n: n.last.register_parameter("bias", None),
    "buffer registered": lambda n: n.register_buffer("more", torch.ones(3)),
    "buffer registered in a layer": lambda n: n.last.register_buffer("more", torch.ones(3)),
    "module registered": lambda n: n.add_module("more", nn.Linear(2, 2)),
    "member of a list of modules": lambda n: n.rows.__setitem__(0, nn.Sigmoid()),
    "member of a dict of modules": lambda n: n.parts.update({"a": nn.ReLU()}),
    "members of a dict exchanged": lambda n: n.parts._modules.update(a=n.parts["b"], b=n.parts["a"]),
    "list of modules extended": lambda n: n.rows.append(nn.Linear(2, 2)),
    "parameters untied": _untied,
    "parameters tied": _tied,
    "parameters swapped": _exchanged_values,
    "frozen and thawed by the network": lambda n: n.requires_grad_(False) and n.last.requires_grad_(True),
    "weight in the instance's dict": _weights_of_others,
    "eps of a normalisation": lambda n: setattr(n.inner[2], "alpha", 1e-9),
    "shape of a normalisation": lambda n: setattr(n.inner[2], "groups", 3),
    "data parallel": lambda n: setattr(n, "last", nn.DataParallel(n.last)),
    "half precision": lambda n: n.last.to(torch.bfloat16),
    "double precision": lambda n: n.double(),
    "empty device": lambda n: n.last.to("meta"),
    "size of a parameter": lambda n: setattr(n.last.weight, "data", torch.ones(6, 6)),
    # objects of Python's library and of others that a network holds
    "namespace of arguments": lambda n: setattr(n.options, "gain", 100.0),
    "slot": lambda n: setattr(n.slotted, "gain", 100.0),
    "number of ctypes": lambda n: setattr(n.number, "value", 100.0),
    "shape of an array": lambda n: setattr(n.array, "shape", (2, 2)),
    "list in an array of objects": lambda n: n.boxes[0].__setitem__(0, 100.0),
    "cell of a closure": lambda n: setattr(n.closed.__closure__[0], "cell_contents", 100.0),
    "default that is a tensor": lambda n: by_default.__defaults__[0].mul_(100),
    "default by keyword": lambda n: by_keyword.__kwdefaults__.update(gain=(100.0,)),
    "attribute of a buffer": lambda n: setattr(n.mask, "gain", 100.0),
    "attribute of a distribution": lambda n: setattr(n.normal, "scale", torch.tensor(100.0)),
    "property of the network": lambda n: put(Network, "gain", property(lambda s: 100 * s.mask)),
    # torch's own state
    "default dtype": lambda n: torch.set_default_dtype(torch.float64),
}  # fmt: skip


def outcome(harness: Harness, name: str, first: dict[str, Tensor], release: Callable[[], dict[str, Tensor]]) -> None:
    """Fails unless the release is refused, or is what it would have been without the edit."""
    try:
        released = release()
    except REFUSALS as refused:
        assert "HINT" in str(refused)
    else:
        for group, values in first.items():  # the default dtype decides in which one some values are rounded
            assert torch.dist(released[group], values) <= 1e-6 * values.norm()
    finally:
        harness.mechanism.close()


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_between_steps_is_refused_or_changes_nothing(name: str) -> None:
    harness = harness_of()
    first = harness.release(BATCH)
    with restored():
        EDITS[name](harness.module.network)
        outcome(harness, name, first, lambda: harness.release(BATCH, 1))


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_between_certificate_and_forward_is_refused_or_changes_nothing(name: str) -> None:
    harness = harness_of()
    first = harness.release(BATCH)
    with restored():
        harness.module.zero_grad(set_to_none=True)
        harness.mechanism.begin_step(1)
        EDITS[name](harness.module.network)

        def release() -> dict[str, Tensor]:
            try:
                harness.module.training_step(BATCH, 0).backward()
            except (RuntimeError, TypeError, AttributeError, NotImplementedError, LookupError):  # it does not even run
                return first
            harness.mechanism.privatize_(1)
            return harness.gradients()

        outcome(harness, name, first, release)
