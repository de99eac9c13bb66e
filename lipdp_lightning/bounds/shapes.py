"""Shapes: the shape of one example at every node of a graph, and whether the node keeps the examples apart."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from .graph import (
    ARITHMETIC,
    CertificationError,
    Problem,
    Undecided,
    decision_problem,
    made_from_input,
    node_path,
    operation_name,
    reads_sizes,
    trace,
)
from .identity import training_mode
from .inplace import MemoryInterpreter, may_overwrite, overwrites_shared_memory, tensors_in, versions
from .registry import UNKNOWN, BatchNumber, Constant, Unbounded, counts_examples, takes_batch_size

Interpreter = TypeVar("Interpreter", bound=fx.Interpreter)
PROBE_BATCHES = (2, 3)
_SINGLE = 1  # with a batch of one example, operations return views in more memory layouts


class _ShapeInterpreter(fx.Interpreter):
    """Runs the graph on zeros and keeps what every node returned, as shapes and numbers."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.seen: dict[str, Any] = {}
        self.dtypes: dict[str, set[torch.dtype]] = {}
        self.overwrites = False

    def run_node(self, n: fx.Node) -> Any:
        read = [self.env[node] for node in n.all_input_nodes]
        before = versions(read)
        result = super().run_node(n)
        self.overwrites |= versions(read) != before
        self.seen[n.name] = fx.node.map_aggregate(result, lambda v: torch.Size(v.shape) if isinstance(v, Tensor) else v)
        self.dtypes[n.name] = {t.dtype for t in tensors_in(result)}
        return result


def _zeros(graph: fx.GraphModule, batch: int, input_shape: tuple[int, ...]) -> Tensor:
    like = next((p for p in graph.parameters()), None)
    dtype = like.dtype if like is not None else torch.get_default_dtype()
    return torch.zeros((batch, *input_shape), dtype=dtype, device=like.device if like is not None else "cpu")


def _run(interpreter: Interpreter, batch: int, input_shape: tuple[int, ...]) -> Interpreter:
    graph = interpreter.module
    assert isinstance(graph, fx.GraphModule)
    try:
        with training_mode(graph, False), torch.no_grad():
            interpreter.run(_zeros(graph, batch, input_shape))
    except Exception as error:  # a user's forward may raise anything
        message = (str(error) or type(error).__name__).splitlines()[0]
        reason = f"it fails on an input of shape (batch, {', '.join(map(str, input_shape))}): {message}"
        raise CertificationError([Problem("forward", reason, "check input_shape, given without the batch")]) from error
    return interpreter


def trace_at(model: nn.Module, input_shape: tuple[int, ...]) -> fx.GraphModule:
    """Returns the graph of a model for inputs of one shape, by whose sizes forward may decide.

    Raises:
        CertificationError: If forward cannot be traced, or decides by anything else.
    """
    decided: list[bool] = []
    while True:
        try:
            return trace(model, decided)
        except Undecided as found:
            node, graph = found.args
            propagate_shapes(graph, input_shape)
            number = node.meta["shape"]
            if not isinstance(number, Number) or counts_examples(number.value):
                raise CertificationError([decision_problem(node)]) from found
            decided.append(bool(number.value))


def propagate_shapes(graph: fx.GraphModule, input_shape: tuple[int, ...]) -> None:
    """Stores in ``node.meta["shape"]`` one example's shape (a list of them for a tuple output), or a number.

    The graph runs at two batch sizes. A tensor whose first dimension does not follow the batch, or whose
    other dimensions do, mixes examples and is recorded as ``MIXED``.

    Raises:
        CertificationError: If forward fails on zeros, computes with the batch size, overwrites memory that is read
            elsewhere, or computes in a dtype without a margin.
    """
    first, second = (_run(_ShapeInterpreter(graph), batch, input_shape) for batch in PROBE_BATCHES)
    for node in graph.graph.nodes:
        node.meta["shape"] = _shape_of(node, first.seen[node.name], second.seen[node.name])
    problems = [p for n in graph.graph.nodes for p in _misused(n, first.dtypes[n.name])]
    problems += _overwritten(graph, input_shape, first.overwrites or second.overwrites)
    if problems:
        raise CertificationError(problems)


def _misused(node: fx.Node, dtypes: set[torch.dtype]) -> list[Problem]:
    """Finds numbers made from the batch size, several activations by keyword, and dtypes without a margin."""
    if node.op not in ("call_module", "call_function", "call_method") or not depends_on_example(node):
        return []
    problems = []
    numbers = [n.meta["shape"] for n in argument_nodes(node) if isinstance(n.meta["shape"], Number)]
    counts = any(counts_examples(number.value) for number in numbers)
    if counts and not (node.op != "call_module" and takes_batch_size(node.target)):
        reason = (
            f"{operation_name(node)} computes with the batch size, or with another number made from the private batch, "
            "so one example changes the result of all others"
        )
        hint = (
            "use a public constant, or name the batch size as the first dimension alone, as x.view(x.size(0), -1) does"
        )
        problems.append(Problem(node_path(node), reason, hint))
    named = [value for value in node.kwargs.values() if any(map(depends_on_example, _nodes_in(value)))]
    if len(named) > 1:
        reason = "it reads several activations by keyword, in an order that its rule does not see"
        problems.append(Problem(node_path(node), reason, "give them by position"))
    without = [d for d in dtypes if d.is_complex or (d.is_floating_point and d not in _WITH_MARGIN)]
    if without:
        reason = f"its output is of {without[0]}, for which no rule and no margin holds"
        problems.append(Problem(node_path(node), reason, "compute with real numbers in float32"))
    return problems


_WITH_MARGIN = (torch.float32, torch.float64, torch.bfloat16)


def _overwritten(graph: fx.GraphModule, input_shape: tuple[int, ...], seen: bool) -> list[Problem]:
    """Finds in-place operations on memory that is read elsewhere; ``seen`` says whether one overwrote an argument."""
    modules: dict[str, nn.Module] = dict(graph.named_modules())
    tensors = [n for n in graph.graph.nodes if not isinstance(n.meta["shape"], Number)]
    called = {n: modules[str(n.target)] if n.op == "call_module" else None for n in tensors}
    if not seen and not any(may_overwrite(n, called[n]) for n in tensors):
        return []
    interpreter = MemoryInterpreter(graph)
    for batch in (_SINGLE, PROBE_BATCHES[0]):
        _run(interpreter, batch, input_shape)
    reason = "overwrites, in place, a value that is read elsewhere"
    hint = "use the operation that returns a new tensor"
    return [
        Problem(node_path(n), f"{operation_name(n)} {reason}", hint)
        for n in tensors
        if overwrites_shared_memory(n, called[n], interpreter)
    ]


MIXED = "mixed"


def depends_on_example(node: fx.Node) -> bool:
    """Returns whether the node's output is a tensor, or a tuple of tensors, made from the input."""
    return isinstance(node.meta["shape"], tuple | list) or node.meta["shape"] == MIXED


def argument_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the nodes in the argument slots, in order and with multiplicity, unlike ``node.all_input_nodes``."""
    return _nodes_in((node.args, node.kwargs))


def output_node(graph: fx.GraphModule) -> fx.Node:
    """Returns the node of the tensor that the model returns, or refuses a model that returns anything else."""
    returned = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    if not isinstance(returned, fx.Node) or not isinstance(returned.meta["shape"], tuple):
        hint = "return one tensor of logits, computed from the input"
        raise CertificationError([Problem("output", "the model does not return one tensor of logits", hint)])
    return returned


def _nodes_in(value: Any) -> tuple[fx.Node, ...]:
    found: list[Any] = []
    fx.node.map_arg(value, found.append)
    return tuple(found)


def _shape_of(node: fx.Node, first: Any, second: Any) -> Any:
    """Returns one example's shape, a list of shapes for a tuple output, MIXED, a Number, or None for constants."""
    if node.op in ("get_attr", "output"):
        return None
    made_from_input = node.op == "placeholder" or any(depends_on_example(n) for n in argument_nodes(node))
    if isinstance(first, torch.Size):
        if not made_from_input:
            return None
        follows = len(first) > 0 and (first[0], second[0]) == PROBE_BATCHES and first[1:] == second[1:]
        return tuple(first[1:]) if follows else MIXED
    if isinstance(first, tuple | list) and first and all(isinstance(v, torch.Size) for v in first):
        if len(first) != len(second):
            return MIXED
        parts = [_shape_of(node, a, b) for a, b in zip(first, second, strict=True)]
        return MIXED if MIXED in parts else parts
    return _number_of(node, first, second)


def _known(node: fx.Node) -> Any:
    """Returns a node's number, or its sizes; None for a tensor that is not made from the input."""
    shape = node.meta["shape"]
    if isinstance(shape, Number):
        return shape.value
    if isinstance(shape, tuple):
        return Sized(shape)
    return UNKNOWN if depends_on_example(node) else None


def _at_batch(value: object, batch: int) -> object:
    """Returns the value as forward sees it at this batch size."""
    if isinstance(value, tuple | list):
        return tuple(_at_batch(v, batch) for v in value)
    return value.at(batch) if isinstance(value, BatchNumber) else value


@dataclass(frozen=True)
class Number:
    """A value of the graph that is not a tensor."""

    value: Any


@dataclass(frozen=True)
class Sized:
    """Stands for a tensor of which only the sizes are known: the batch, and the shape of one example."""

    inner: tuple[int, ...]

    @property
    def shape(self) -> tuple[Any, ...]:
        return (BatchNumber(1), *self.inner)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> Any:
        return BatchNumber(1) * math.prod(self.inner)

    def dim(self) -> int:
        return self.ndim

    ndimension = dim


def _number_of(node: fx.Node, first: Any, second: Any) -> Number:
    """Returns the number that a node computes, with the batch size in it as a :class:`BatchNumber`.

    ``first`` and ``second`` are what it computed at two batch sizes; a number that does not agree with both is unknown.
    """
    args = fx.node.map_arg((node.args, node.kwargs), _known)
    if not any(isinstance(v, Sized) or counts_examples(v) for v in map(_known, argument_nodes(node))):
        return Number(first if first == second and reads_sizes(node) else UNKNOWN)
    if node.target is getattr and node.args[1] in ("dtype", "device"):
        return Number(first)
    try:
        value = _evaluate(node, *args) if reads_sizes(node) else UNKNOWN
    except (TypeError, AttributeError, LookupError, ArithmeticError, ValueError):
        value = UNKNOWN
    agrees = tuple(_at_batch(value, batch) for batch in PROBE_BATCHES) == (first, second)
    return Number(value if agrees else UNKNOWN)


def _evaluate(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if node.op == "call_method" or node.target is torch.numel:
        name = "numel" if node.target is torch.numel else str(node.target)
        of, *rest = args
        if isinstance(of, tuple) and name == "numel":
            return math.prod(of, start=1)
        if not isinstance(of, Sized):
            return UNKNOWN
        return getattr(of, name)(*rest, **kwargs)
    if node.target is getattr:
        return getattr(args[0], args[1]) if isinstance(args[0], Sized) else UNKNOWN
    if node.target not in ARITHMETIC or any(isinstance(a, Sized) for a in args):
        return UNKNOWN
    return node.target(*args, **kwargs)


class Hides(Exception):
    """Raised if a forward pass does what the graph would not show."""


class OfBatch:
    """A number made from the batch size, which forward may compute with and pass on, and may not compare."""

    public: Any  # the same number without these restrictions
    number: BatchNumber  # which multiple of the batch size it is


def _refuses(self: Any, *_: Any) -> Any:
    raise Hides("its forward makes a decision by the size of the batch, which is private")


def _of_batch(value: Any, number: Any) -> Any:
    """Returns the value as one that is made from the batch size, unless ``number`` says that it is public."""
    kind = {int: _IntegerOfBatch, float: _FloatOfBatch}.get(type(value))
    if kind is None or isinstance(number, int | float):
        return value
    made: Any = kind(value)
    made.public, made.number = value, number if isinstance(number, BatchNumber) else UNKNOWN
    return made


def _computes(name: str, kind: type) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        value = getattr(kind, name)(self, *(getattr(other, "public", other) for other in others))
        try:
            number = getattr(self.number, name)(*(getattr(other, "number", other) for other in others))
        except (AttributeError, TypeError):
            number = UNKNOWN
        return _of_batch(value, number)

    return method


def _restricted(kind: type) -> dict[str, Any]:
    compared = ("lt", "le", "gt", "ge", "eq", "ne", "bool", "hash", "int", "float", "round", "trunc", "floor", "ceil")
    computed = ("add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "pos", "abs", "pow")
    names = [f"__{side}{name}__" for name in computed for side in ("", "r")]
    return {f"__{name}__": _refuses for name in compared} | {n: _computes(n, kind) for n in names if hasattr(kind, n)}


_IntegerOfBatch = type("_IntegerOfBatch", (OfBatch, int), _restricted(int))
_FloatOfBatch = type("_FloatOfBatch", (OfBatch, float), _restricted(float))


def with_batch_marked(func: Any, args: Any, result: Any) -> Any:
    """Returns a size that was read from a tensor made from the input, with the batch size in it marked."""
    name = getattr(getattr(func, "__self__", None), "__name__", None) or getattr(func, "__name__", "")
    if isinstance(result, torch.Size) and result:
        return torch.Size((_of_batch(result[0], BatchNumber(1)), *result[1:]))
    if name in ("numel", "nelement"):
        return _of_batch(result, BatchNumber(math.prod(args[0].shape[1:])))
    first = name == "size" and len(args) > 1 and args[1] in (0, -args[0].dim())
    return _of_batch(result, BatchNumber(1) if first else UNKNOWN) if first or name == "nbytes" else result


_FROM_WEIGHTS = (
    "it reads a tensor that forward computes from a trained parameter, whose gradient no rule bounds",
    "let layers read their weights directly, or detach() what is computed from them",
)
_FROM_CONSTANTS = (
    "it reads a tensor that forward computes from constants or weights alone",
    "register constants as buffers, and let layers read their weights directly",
)


class Constants:
    """The buffers and parameters of the network as they are now, and values computed from these alone."""

    def __init__(self, network: nn.Module, graph: fx.GraphModule) -> None:
        self._network, self._graph = network, graph
        self._from_input = made_from_input(graph)
        self._known: dict[fx.Node, Any] = {}

    def begin(self) -> None:
        """Forgets the values of the last walk, since buffers and weights may have changed."""
        self._known = {}

    def argument(self, node: fx.Node) -> Any:
        """Returns the argument that a rule is given for the node: a parameter, a Constant, or a number."""
        value = self._value(node)
        if isinstance(value, nn.Parameter):
            return value
        if isinstance(value, Tensor):
            if value.requires_grad:
                raise Unbounded(*_FROM_WEIGHTS)
            return Constant(value)
        return value

    def _value(self, node: fx.Node) -> Any:
        if node not in self._known:
            self._known[node] = self._work_out(node)
        return self._known[node]

    def _work_out(self, node: fx.Node) -> Any:
        shape = node.meta["shape"]
        if isinstance(shape, Number) and node in self._from_input:
            return shape.value
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        args = fx.node.map_arg(node.args, self._value)
        kwargs = fx.node.map_arg(node.kwargs, self._value)
        members: list[Any] = []
        fx.node.map_aggregate((args, kwargs), members.append)
        if node.op not in ("call_function", "call_method") or any(map(counts_examples, members)):
            raise Unbounded(*_FROM_CONSTANTS)
        parameters = [value for value in members if isinstance(value, nn.Parameter)]
        if parameters and node.target not in ("detach", torch.detach, torch.Tensor.detach, getattr):
            raise Unbounded(*(_FROM_WEIGHTS if any(p.requires_grad for p in parameters) else _FROM_CONSTANTS))
        with torch.enable_grad():
            if node.op == "call_method":
                receiver, *rest = args
                return getattr(receiver, str(node.target))(*rest, **kwargs)
            function: Any = node.target
            return function(*args, **kwargs)

    def _attribute(self, target: str) -> Any:
        held: Any = self._graph if target.startswith("_tensor_constant") else self._network
        return operator.attrgetter(target)(held)
