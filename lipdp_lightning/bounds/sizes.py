"""What forward reads of shapes, as numbers that hold at every batch size."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .batch_numbers import UNKNOWN, BatchNumber, at_batch, counts_examples

_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device"})
_METHODS = frozenset({"size", "numel", "dim", "ndimension"})
_ARITHMETIC: frozenset[Callable[..., Any]] = frozenset(
    {
        operator.getitem, operator.mul, operator.add, operator.sub, operator.floordiv, operator.truediv,
        operator.neg, operator.pos, operator.imul, operator.iadd, operator.isub, operator.itruediv,
    }
)  # fmt: skip
_OF_PUBLIC_NUMBERS: frozenset[Callable[..., Any]] = frozenset({operator.mod, operator.abs})


@dataclass(frozen=True)
class Number:
    """A value of the graph that is not a tensor."""

    value: Any


@dataclass(frozen=True)
class Sized:
    """What the size of a tensor tells: the batch and the shape of one example."""

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


def may_be_number(node: fx.Node) -> bool:
    """Whether the node may give a number that needs no rule; where it gives a tensor after all, it needs one."""
    return node.target is getattr or reads_sizes(node)


def reads_sizes(node: fx.Node) -> bool:
    """Whether the node reads a tensor's shape, or computes with what was read."""
    if node.op == "call_method":
        return node.target in _METHODS
    if node.target is getattr:
        return len(node.args) == 2 and node.args[1] in _ATTRIBUTES
    return node.target is torch.numel or node.target in _ARITHMETIC | _OF_PUBLIC_NUMBERS


def number_of(node: fx.Node, found: tuple[Any, Any], batches: tuple[int, int], value_of: Callable[..., Any]) -> Number:
    """Returns the number that a node gives, with the batch size in it as a :class:`BatchNumber`.

    Args:
        node: The node, which gives no tensor.
        found: What it gave at each of two batch sizes.
        batches: The two batch sizes.
        value_of: Gives a node's number, a :class:`Sized` for a tensor made from the input, or None for other tensors.
    """
    args = fx.node.map_arg((node.args, node.kwargs), value_of)
    if not _made_from_batch(args):
        return Number(found[0] if found[0] == found[1] and reads_sizes(node) else UNKNOWN)
    if node.target is getattr and node.args[1] in ("dtype", "device"):
        return Number(found[0])
    try:
        value = _evaluate(node, *args) if reads_sizes(node) else UNKNOWN
    except (TypeError, AttributeError, LookupError, ArithmeticError, ValueError):
        value = UNKNOWN
    agrees = all(at_batch(value, batch) == was for batch, was in zip(batches, found, strict=True))
    return Number(value if agrees else UNKNOWN)


def _made_from_batch(value: Any) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return any(map(_made_from_batch, value))
    return isinstance(value, Sized) or counts_examples(value)


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
    if node.target not in _ARITHMETIC or any(isinstance(a, Sized) for a in args):
        return UNKNOWN
    return node.target(*args, **kwargs)
