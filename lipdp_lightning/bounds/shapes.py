"""The shape of one example at every node of a graph, and whether the node keeps the examples apart."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from .batch_numbers import UNKNOWN, counts_examples
from .inplace import MemoryInterpreter, may_overwrite, overwrites_shared_memory, tensors_in, versions
from .registry import takes_batch_size
from .sizes import Number, Sized, number_of
from .trace import CertificationError, Problem, node_path, operation_name, training_mode

Interpreter = TypeVar("Interpreter", bound=fx.Interpreter)
PROBE_BATCHES = (2, 3)
_SINGLE = 1  # of one example, memory has more layouts in which an operation returns a view


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
    except Exception as error:  # whatever a user's forward raises on a tensor
        message = (str(error) or type(error).__name__).splitlines()[0]
        reason = f"it fails on an input of shape (batch, {', '.join(map(str, input_shape))}): {message}"
        raise CertificationError([Problem("forward", reason, "check input_shape, given without the batch")]) from error
    return interpreter


def propagate_shapes(graph: fx.GraphModule, input_shape: tuple[int, ...]) -> None:
    """Store in ``node.meta["shape"]`` one example's shape (a tuple of them for a tuple output), or a number.

    The graph runs at two batch sizes: a tensor whose first dimension does not follow the batch, or whose
    other dimensions do, mixes examples and is recorded as a string that says so.

    Raises:
        CertificationError: Where forward fails on zeros, computes with the batch size, overwrites memory that is read
            elsewhere, or leaves the real numbers of 32 and 64 bits.
    """
    first, second = (_run(_ShapeInterpreter(graph), batch, input_shape) for batch in PROBE_BATCHES)
    for node in graph.graph.nodes:
        node.meta["shape"] = _shape_of(node, first.seen[node.name], second.seen[node.name])
    problems = [p for n in graph.graph.nodes for p in _misused(n, first.dtypes[n.name])]
    problems += _overwritten(graph, input_shape, first.overwrites or second.overwrites)
    if problems:
        raise CertificationError(problems)


def _misused(node: fx.Node, dtypes: set[torch.dtype]) -> list[Problem]:
    """Numbers made from the batch size that reach an operation on examples, mixed keywords, and odd dtypes."""
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
    """In-place operations on memory that is read elsewhere; ``seen``: a node did overwrite an argument when it ran."""
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
    """Whether the node's output is a tensor, or a tuple of tensors, made from the input."""
    return isinstance(node.meta["shape"], tuple | list) or node.meta["shape"] == MIXED


def argument_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes in the argument slots, in order and with multiplicity; ``node.all_input_nodes`` lists each once."""
    return _nodes_in((node.args, node.kwargs))


def _nodes_in(value: Any) -> tuple[fx.Node, ...]:
    found: list[fx.Node] = []

    def keep(n: fx.Node) -> fx.Node:
        found.append(n)
        return n

    fx.node.map_arg(value, keep)
    return tuple(found)


def _shape_of(node: fx.Node, first: Any, second: Any) -> Any:
    """One example's shape; a list for a tuple output; MIXED; the number itself; or None for constants."""
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
    return number_of(node, (first, second), PROBE_BATCHES, _known)


def _known(node: fx.Node) -> Any:
    """A node's number, or what its size tells; None for a tensor that is not made from the input."""
    shape = node.meta["shape"]
    if isinstance(shape, Number):
        return shape.value
    if isinstance(shape, tuple):
        return Sized(shape)
    return UNKNOWN if depends_on_example(node) else None
