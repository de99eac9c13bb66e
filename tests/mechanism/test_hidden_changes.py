"""Changes of a network in mid-run that reach it indirectly: by methods, classes, modules, modes or tensors' classes."""

from __future__ import annotations

import types
import weakref
from collections import UserList, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial, partialmethod
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from private_step import Harness, make_plan, random_batch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lipdp_lightning.bounds.certifier import CertificationError

REFUSALS = (ValueError, CertificationError, AssertionError)
BATCH = random_batch(5, (4,), 3)
GAIN = 1.0

constants = types.ModuleType("constants")
constants.inner = types.ModuleType("constants.inner")  # type: ignore[attr-defined]
constants.GAIN = constants.inner.GAIN = 1.0  # type: ignore[attr-defined]


class Options(NamedTuple):
    gains: list[float]


class Number(float):
    extra = 1.0


class Settings:
    gain = 1.0

    def __init__(self) -> None:
        self.own = 1.0

    def scale(self) -> float:
        return self.own


class Meta(type):
    gain = 1.0


class WithMeta(metaclass=Meta):
    pass


class Described:
    def __get__(self, thing: Any, kind: Any) -> float:
        return GAIN


class AlwaysEqual:
    """It claims to equal everything, as ``unittest.mock.ANY`` does."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, *args: Any) -> Any:
        return self.value(*args)

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __rmul__(self, other: Any) -> Any:
        return other * 100


def helper() -> float:
    return 1.0


helper.gain = 1.0  # type: ignore[attr-defined]


@lru_cache
def cached() -> float:
    return GAIN


def product(x: Any, *, gain: list[float]) -> Any:
    return x * gain[0]


class Network(nn.Module):
    width = 1.0
    described = Described()
    times = partialmethod(lambda self, x, gain: x * gain[0], gain=[1.0])

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("mask", torch.ones(6))
        self.options, self.number, self.pair = Options([1.0]), Number(1.0), (1.0, True)
        self.settings, self.table = Settings(), torch.ones(6)
        self.scale, self.kind, self.meta = Settings().scale, Settings, WithMeta
        self.product = partial(product, gain=[1.0])
        self.nested = {"a": [(deque([1.0]), {"b": [1.0]})]}
        self.held = UserList([1.0])
        self.weak = weakref.ref(self.settings)
        self.view = memoryview(bytearray(b"\x01"))
        self.function = lambda x: x * 1.0
        self.tensors = (torch.ones(6),)
        self.name, self.order = "plain", {"a": 1.0, "b": 1.0, "{": {"}": 1.0}}

    @property
    def gain(self) -> float:
        return GAIN

    @cached_property
    def kept(self) -> float:
        return 1.0

    def doubled(self, x: Any) -> Any:
        return x

    def forward(self, x: Any) -> Any:
        x = self.first(x) * self.mask * self.table * self.tensors[0]
        x = x * self.options.gains[0] * self.number.extra * (100.0 if self.pair[1] is not True else 1.0)
        x = x * getattr(self, "wid" + "th") * self.described * self.scale() * self.kind.gain * self.meta.gain
        x = x * Settings.gain * helper.gain * cached() * constants.GAIN * constants.inner.GAIN * self.gain
        x = self.product(self.times(self.function(self.doubled(x))))
        x = x * self.nested["a"][0][0][0] * self.nested["a"][0][1]["b"][0] * self.held[0] * self.weak().own
        return self.last(x * float(self.view[0]) * (1.0 if self.name == "plain" else 100.0) * {**self.order}["b"])


class Loud(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return 100 * result if func is F.linear else result


class LoudFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 100 * result if func is F.linear else result


class LoudOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 100 * result if "mm" in str(func) else result


def set_global(name: str, value: Any) -> Callable[[Any], None]:
    return lambda network: globals().__setitem__(name, value)


def _another_cached_value(network: Any) -> None:
    globals()["GAIN"] = 1.0
    cached.__wrapped__.__globals__["GAIN"] = 150.0
    cached.cache_clear()


def _partial_state(network: Any) -> None:
    network.product.__setstate__((lambda x, gain: 100 * x, (), {"gain": [1.0]}, {}))


def _swap(network: Any) -> None:
    torch.utils.swap_tensors(network.first.weight, Loud(torch.ones(6, 4)))


def _accumulator(network: Any) -> None:
    weight = network.first.weight
    node = weight.view_as(weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda g: (100 * g[0],))
    KEPT[:] = [node]


KEPT: list[Any] = []
EDITS: dict[str, Callable[[Any], Any]] = {
    "list in a named tuple": lambda n: n.options.gains.__setitem__(0, 150.0),
    "attribute of a number": lambda n: setattr(n.number, "extra", 150.0),
    "attribute of a class of numbers": lambda n: setattr(Number, "extra", 150.0),
    "a tuple that only equals": lambda n: setattr(n, "pair", (1.0, 1)),
    "tuple of tensors": lambda n: setattr(n, "tensors", (torch.full((6,), 100.0),)),
    "class attribute read by a computed name": lambda n: setattr(Network, "width", 150.0),
    "a global that a descriptor reads": set_global("GAIN", 150.0),
    "object of a bound method": lambda n: setattr(n.scale.__self__, "own", 150.0),
    "attribute of a class in an attribute": lambda n: setattr(n.kind, "gain", 150.0),
    "attribute of a metaclass": lambda n: setattr(Meta, "gain", 150.0),
    "attribute of a function": lambda n: setattr(helper, "gain", 150.0),
    "a global that a cached function reads": _another_cached_value,
    "attribute of a module": lambda n: setattr(constants, "GAIN", 150.0),
    "attribute of a module in a module": lambda n: setattr(constants.inner, "GAIN", 150.0),
    "keywords of a partial": lambda n: n.product.keywords.__setitem__("gain", [150.0]),
    "list among the keywords of a partial": lambda n: n.product.keywords["gain"].__setitem__(0, 150.0),
    "function of a partial": _partial_state,
    "list of a partial method": lambda n: vars(Network)["times"].keywords["gain"].__setitem__(0, 150.0),
    "deque in a tuple in a list in a dict": lambda n: n.nested["a"][0][0].__setitem__(0, 150.0),
    "list in a dict in a tuple in a list in a dict": lambda n: n.nested["a"][0][1]["b"].__setitem__(0, 150.0),
    "a key with a brace": lambda n: n.order["{"].__setitem__("}", 150.0),
    "user list": lambda n: n.held.__setitem__(0, 150.0),
    "object behind a weak reference": lambda n: setattr(n.weak(), "own", 150.0),
    "bytes behind a view": lambda n: n.view.__setitem__(0, 100),
    "text": lambda n: setattr(n, "name", "loud"),
    "code of a lambda": lambda n: setattr(n.function, "__code__", (lambda x: 100 * x).__code__),
    "method that claims to be equal": lambda n: setattr(Network, "doubled", AlwaysEqual(lambda x: 100 * x)),
    "property replaced": lambda n: setattr(Network, "gain", 150.0),
    "number that claims to be equal": lambda n: setattr(n, "number", AlwaysEqual(None)),
    "class of a parameter": lambda n: setattr(n.first.weight, "__class__", Loud),
    "parameter swapped for one of another class": _swap,
    "dtype of a parameter": lambda n: setattr(n.first.bias, "data", n.first.bias.data.double()),
    "dtype of a buffer": lambda n: setattr(n.mask, "data", n.mask.data.bfloat16()),
    "parametrization": lambda n: torch.nn.utils.parametrize.register_parametrization(n.first, "weight", nn.Identity()),
    "weights tied": lambda n: setattr(n.last, "bias", nn.Parameter(n.first.bias[:3])),
    "module removed from its dict": lambda n: n._modules.pop("last"),
    "modules exchanged": lambda n: n._modules.update(first=n.last, last=n.first),
    "order of a dict": lambda n: n.nested.update(a=n.nested.pop("a")) or n.order.update(a=n.order.pop("a")),
    "function of torch that a layer calls": lambda n: setattr(F, "linear", AlwaysEqual(lambda *a: 100 * LINEAR(*a))),
    "hook on an accumulator": _accumulator,
}  # fmt: skip
LINEAR = F.linear


@contextmanager
def _restored() -> Iterator[None]:
    kept = {kind: dict(vars(kind)) for kind in (Network, Number, Settings, Meta)}
    try:
        yield
    finally:
        for kind, members in kept.items():
            for name in [n for n in vars(kind) if n not in members]:
                delattr(kind, name)
            for name, value in members.items():
                if vars(kind).get(name) is not value:
                    setattr(kind, name, value)
        globals()["GAIN"], helper.gain, F.linear = 1.0, 1.0, LINEAR  # type: ignore[attr-defined]
        constants.GAIN = constants.inner.GAIN = 1.0  # type: ignore[attr-defined]
        vars(Network)["times"].keywords["gain"][0] = 1.0
        cached.cache_clear()
        KEPT.clear()


def harness_of() -> Harness:
    torch.manual_seed(0)
    return Harness(Network(), (4,), make_plan(scaling="worst_case", max_norm=None))


@pytest.mark.parametrize("name", EDITS)
def test_an_indirect_change_between_steps_releases_nothing(name: str) -> None:
    harness = harness_of()
    harness.release(BATCH)
    with _restored():
        EDITS[name](harness.module.network)
        with pytest.raises(REFUSALS, match="HINT"):
            harness.release(BATCH, 1)
    harness.mechanism.close()


@pytest.mark.parametrize("name", [n for n in EDITS if n != "hook on an accumulator"])
def test_an_indirect_change_within_a_step_releases_nothing(name: str) -> None:
    harness = harness_of()
    with _restored():
        harness.accumulate(BATCH)
        EDITS[name](harness.module.network)
        with pytest.raises(REFUSALS, match="HINT"):
            harness.mechanism.privatize_(0)
    harness.mechanism.close()


@contextmanager
def _louder_saved_tensors() -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: 100 * t):
        yield


MODES: dict[str, Callable[[], Any]] = {
    "function mode": LoudFunctions,
    "dispatch mode": LoudOperations,
    "hooks on saved tensors": _louder_saved_tensors,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("name", MODES)
def test_a_step_under_a_mode_that_changes_operations_releases_nothing(name: str) -> None:
    harness = harness_of()
    harness.release(BATCH)
    with MODES[name](), pytest.raises(REFUSALS, match="HINT"):
        harness.release(BATCH, 1)
    harness.mechanism.close()


def test_a_default_device_is_no_obstacle() -> None:
    harness = harness_of()
    with torch.device("cpu"):
        harness.release(BATCH)
    harness.mechanism.close()
