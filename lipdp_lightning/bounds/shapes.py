"""The shape of one example at every node of a graph, and whether the node keeps the examples apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .trace import CertificationError, Problem, training_mode
from .values import BatchNumber

PROBE_BATCHES = (2, 3)


class _ShapeInterpreter(fx.Interpreter):
    """Runs the graph on zeros and keeps what every node returned, as shapes and numbers."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.seen: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.seen[n.name] = fx.node.map_aggregate(result, lambda v: torch.Size(v.shape) if isinstance(v, Tensor) else v)
        return result


def _run(graph: fx.GraphModule, batch: int, input_shape: tuple[int, ...], like: Tensor | None) -> dict[str, Any]:
    dtype = like.dtype if like is not None else torch.get_default_dtype()
    device = like.device if like is not None else "cpu"
    interpreter = _ShapeInterpreter(graph)
    with torch.no_grad():
        interpreter.run(torch.zeros((batch, *input_shape), dtype=dtype, device=device))
    return interpreter.seen


def propagate_shapes(graph: fx.GraphModule, input_shape: tuple[int, ...]) -> None:
    """Store in ``node.meta["shape"]`` one example's shape (a tuple of them for a tuple output), or a number.

    The graph runs at two batch sizes: a tensor whose first dimension does not follow the batch, or whose
    other dimensions do, mixes examples and is recorded as a string that says so.
    """
    like = next((p for p in graph.parameters()), None)
    try:
        with training_mode(graph, False):
            first, second = (_run(graph, batch, input_shape, like) for batch in PROBE_BATCHES)
    except Exception as error:  # whatever a user's forward raises on a tensor
        message = (str(error) or type(error).__name__).splitlines()[0]
        reason = f"it fails on an input of shape (batch, {', '.join(map(str, input_shape))}): {message}"
        raise CertificationError([Problem("forward", reason, "check input_shape, given without the batch")]) from error
    for node in graph.graph.nodes:
        node.meta["shape"] = _shape_of(node, first[node.name], second[node.name])


MIXED = "mixed"


def depends_on_example(node: fx.Node) -> bool:
    """Whether the node's output is a tensor, or a tuple of tensors, made from the input."""
    return isinstance(node.meta["shape"], tuple | list) or node.meta["shape"] == MIXED


def argument_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes in the argument slots, in order and with multiplicity; ``node.all_input_nodes`` lists each once."""
    found: list[fx.Node] = []

    def keep(n: fx.Node) -> fx.Node:
        found.append(n)
        return n

    fx.node.map_arg((node.args, node.kwargs), keep)
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
    same = first == second and not any(_counts_examples(n) for n in argument_nodes(node))
    return Number(first if same else BatchNumber(first))


def _counts_examples(node: fx.Node) -> bool:
    """Whether it is a number made from the batch size; what is computed from it may agree at both probes."""
    shape = node.meta["shape"]
    return (
        isinstance(shape, Number)
        and isinstance(shape.value, BatchNumber)
        and not isinstance(shape.value.value, tuple)  # of a whole shape, single entries may be public
    )


@dataclass(frozen=True)
class Number:
    """A value of the graph that is not a tensor."""

    value: Any
