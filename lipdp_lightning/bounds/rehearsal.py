"""Rehearsal: forward passes on real tensors are compared with the traced graph, which must compute the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from .graph import hooked, hooked_everywhere, is_leaf
from .identity import NetworkIdentity, modes_of, training_mode
from .reachable import set_in_steps
from .shapes import Hides, OfBatch, with_batch_marked

Operation = tuple[Any, tuple[Any, ...]]

_SIZES = (2, 3, 2)  # one size occurs twice, so that a forward which counts its calls is found
_READS = frozenset(
    {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__",
     "__contains__", "equal", "allclose", "is_nonzero", "data_ptr", "untyped_storage", "storage", "__len__"}
)  # fmt: skip
_ROUNDING = 1e-3
"""The relative difference of two computations of the same values that counts as rounding."""


def rehearse(network: nn.Module, graph: fx.GraphModule, input_shape: tuple[int, ...]) -> list[str]:
    """Returns the reasons why the graph does not compute what the network does; the list is empty if it does.

    Both run on random tensors with all modules in training mode, all in evaluation mode, and in their present modes;
    dropout passes its input on. Their operations on tensors that depend on the input must agree one by one, and so must
    their outputs and, where gradients are computed, the gradients of all parameters: what operations do not show, such
    as a hook on a value, shows there. Forward must not read values of tensors or compare the size of the batch, and
    nothing that the network holds may change.

    Args:
        network: The network.
        graph: The graph that was traced from it.
        input_shape: The shape of one example.
    """
    paths = {id(m): name for name, m in network.named_modules() if is_leaf(m)}
    before, contents, drawn = NetworkIdentity.of(network), _contents(network, paths), _random_states()
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    *usual, present = modes_of(network, [module.__dict__ for module in network.modules()])
    try:
        for mode, sizes in ((True, _SIZES), (False, _SIZES[:1]), (None, _SIZES[:1])):
            if mode is None and present in usual:
                continue
            for size in sizes:
                x, learns = _inputs(graph, size, input_shape), mode is not False
                with nullcontext() if mode is None else training_mode(network, mode), _without_reports(network):
                    expected, seen = (_run(one, paths, x, trained if learns else None) for one in (graph, network))
                if differences := seen.differences(expected):
                    return [_DISAGREES + ", ".join(differences)]
    except Hides as found:
        return [str(found).splitlines()[0]]  # fx adds the place in its graph
    reasons = [f"its forward changes what it holds: {what}" for what in before.differences()]
    reasons += [f"its forward changes the values of {n}" for n, t in _contents(network, paths).items()
                if not _equal(t, contents[n])]  # fmt: skip
    if drawn != _random_states():
        reasons.append("its forward draws random numbers, which the graph would hold as constants")
    return reasons


_DISAGREES = "its forward computes on tensors something else than when it is traced: "


@dataclass
class _Run:
    """A pass: its operations on tensors that depend on the input, its output, and the parameters' gradients."""

    operations: list[Operation] = field(default_factory=list)
    returned: Any = None
    output: Any = None
    gradients: Sequence[Tensor] = ()

    def differences(self, other: _Run) -> list[str]:
        """Returns a text for the first difference from another run; the list is empty if they agree."""
        for mine, its in zip(self.operations, other.operations, strict=False):
            if not _same(mine, its):
                return [f"{_name(mine[0])} in place of {_name(its[0])}" if mine[0] != its[0]
                        else f"{_name(mine[0])} with other arguments"]  # fmt: skip
        if len(self.operations) != len(other.operations):
            return [f"{len(self.operations)} operations in place of {len(other.operations)}"]
        if not _same(self.returned, other.returned):
            return ["it returns something else"]
        if not all(map(_close, _tensors(self.output), _tensors(other.output))):
            return ["its operations return other values"]
        return [] if all(map(_close, self.gradients, other.gradients)) else ["its gradients are others"]


class _Recorder(TorchFunctionMode):
    """Records operations on tensors that depend on the input, and refuses to read values."""

    def __init__(self, paths: dict[int, str], x: Tensor) -> None:
        super().__init__()
        self.run = _Run()
        self.inside = False  # whether a module that has a rule is running
        self._paths = paths
        self._made: dict[int, tuple[int, Tensor]] = {id(x): (0, x)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") in _READS:
            name = func.__name__
            raise Hides(f"its forward reads the values of a tensor ({name}), and the graph would keep them")
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return with_batch_marked(func, args, result) if id(args[0] if args else None) in self._made else result

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of ``nn.Module.__call__``, without trusted hooks and compiled code."""
        if hooked(module) or hooked_everywhere():
            raise Hides(f"its forward attaches a hook to {type(module).__name__}, or to all modules, while it runs")
        path = self._paths.get(id(module))
        if self.inside or path is None:
            return module.forward(*args, **kwargs)
        self.inside = True
        try:
            with torch.random.fork_rng(devices=[]):  # a module with a rule may draw random numbers
                result = args[0].clone() if isinstance(module, _DropoutNd) else module.forward(*args, **kwargs)
        finally:
            self.inside = False
        self._note(path, args, kwargs, result)
        return result

    def described(self, value: Any) -> Any:
        """Returns a value in the form in which it is compared: a tensor that depends on the input is its number."""
        if isinstance(value, Tensor):
            made = self._made.get(id(value))
            return value if made is None else _Made(made[0])
        if isinstance(value, list | tuple):
            return tuple(self.described(v) for v in value)
        if isinstance(value, dict):
            return tuple((k, self.described(v)) for k, v in value.items())
        if isinstance(value, slice):
            return "slice", self.described((value.start, value.stop, value.step))
        return value.public if isinstance(value, OfBatch) else value

    def _note(self, what: Any, args: Any, kwargs: Any, result: Any) -> None:
        arguments = self.described((args, kwargs))
        made = list(_tensors(result))
        if made and _depends(arguments):
            self.run.operations.append((what, arguments))
            for tensor in made:
                self._made[id(tensor)] = len(self._made) + 1, tensor


@dataclass(frozen=True)
class _Made:
    number: int


def _tensors(value: Any) -> Iterator[Tensor]:
    return (t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, Tensor))


def _depends(described: Any) -> bool:
    return isinstance(described, _Made) or (isinstance(described, tuple) and any(map(_depends, described)))


def _run(network: nn.Module, paths: dict[int, str], x: Tensor, trained: list[nn.Parameter] | None) -> _Run:
    """Runs a network or its graph, and computes the gradients of the parameters unless they are None."""
    recorder = _Recorder(paths, x)
    run = recorder.run
    with torch.inference_mode(False), torch.set_grad_enabled(trained is not None):
        with _calls(recorder.call), recorder:
            run.output = fx.Interpreter(network).run(x) if isinstance(network, fx.GraphModule) else network(x)
            run.returned = recorder.described(run.output)
        outputs = [t for t in _tensors(run.output) if t.requires_grad]
        if outputs and trained:
            run.gradients = torch.autograd.grad(
                outputs, trained, list(map(_directions, outputs)), allow_unused=True, materialize_grads=True
            )
    return run


def _directions(output: Tensor) -> Tensor:
    return torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(output)


@contextmanager
def _without_reports(network: nn.Module) -> Iterator[None]:
    """Takes away what a mechanism has set on the layers, so that they compute as before and report to nobody."""
    kept = [(vars(m), {n: vars(m)[n] for n in set_in_steps(type(m)) if n in vars(m)}) for m in network.modules()]
    try:
        for attributes, names in kept:
            for name in names:
                del attributes[name]
        yield
    finally:
        for attributes, names in kept:
            attributes.update(names)


@contextmanager
def _calls(call: Callable[..., Any]) -> Iterator[None]:
    original = nn.Module.__call__
    try:
        nn.Module.__call__ = lambda module, *args, **kwargs: call(module, *args, **kwargs)  # type: ignore[method-assign]
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


def _inputs(graph: fx.GraphModule, size: int, shape: tuple[int, ...]) -> Tensor:
    like = next(graph.parameters(), torch.zeros(()))
    generator = torch.Generator().manual_seed(size)
    with torch.inference_mode(False):
        return torch.randn((size, *shape), generator=generator).to(like)


def _contents(network: nn.Module, paths: dict[int, str]) -> dict[str, Tensor]:
    """Returns the values of parameters and buffers, except for those of modules that have a rule."""
    inside = tuple(f"{path}." for path in paths.values())
    held = [*network.named_parameters(), *network.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in held if not name.startswith(inside)}


def _random_states() -> tuple[Any, ...]:
    numpy = np.random.get_state(legacy=False)
    words = numpy["state"].pop("key", np.empty(0))  # which take milliseconds to print
    return torch.random.get_rng_state().numpy().tobytes(), random.getstate(), str(numpy), words.tobytes()


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b or (isinstance(a, Tensor) and isinstance(b, Tensor) and _equal(a.detach(), b.detach()))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)


def _close(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors agree up to rounding."""
    wide, other = (t.detach().double().nan_to_num() for t in (a, b))
    return a.shape == b.shape and bool(torch.dist(wide, other) <= _ROUNDING * wide.norm() + 1e-12)


def _name(what: Any) -> str:
    return what if isinstance(what, str) else getattr(what, "__name__", str(what))
