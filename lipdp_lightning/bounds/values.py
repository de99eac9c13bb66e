"""Arguments and results of rules: bounds on one example's values, and never the values themselves.

A walk makes several of these objects for every node at every step. Frozen objects would take four times as long to
make, so these are not frozen; nothing changes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..norms.operators import NormSource as NormSource
from ..norms.operators import Operator


class Unbounded(Exception):
    """Raised by a rule for an operation that cannot be certified; all of a model's are reported at once."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


@dataclass
class Value:
    """Stands for a tensor that depends on examples: ``norm`` bounds the l2 norm of one example's part of it."""

    norm: float
    shape: tuple[int, ...]  # the shape of one example, without the batch dimension

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Constant:
    """A buffer or another public tensor that the graph reads; it has no batch dimension of its own."""

    tensor: Tensor


@dataclass
class ParameterUse:
    """One use of parameters that form a group.

    Guarantee: for a cotangent d at the node's output, the gradient of one example with respect to all of
    ``parameters`` together has norm at most ``gradient_factor * ||d||``.
    """

    parameters: tuple[Tensor, ...]
    gradient_factor: float


@dataclass
class Bound:
    """The result of a rule.

    Attributes:
        norm: Bounds one example's output.
        lipschitz: Bounds the operation's Jacobian in each argument slot that holds a Value, in the order in which the
            operation reads them. One number stands for a single slot.
        uses: The trained parameters that the operation uses.
        quadrature: Whether the slots fill disjoint parts of the output, as the inputs of ``cat`` do, and so combine by
            root of squares.
        cotangent_cap: Bounds the cotangent that the operation passes on, whatever it receives.
        parts: One output bound for each member of a tuple output.
        slots: ``lipschitz``, one number for each slot, as the certifier fills it in.
    """

    norm: float
    lipschitz: float | tuple[float, ...]
    uses: tuple[ParameterUse, ...] = ()
    quadrature: bool = False
    cotangent_cap: float = math.inf
    parts: tuple[float, ...] = ()
    slots: tuple[float, ...] = ()


@dataclass(frozen=True)
class Operation:
    """Describes a node to its rule: the module (None for functions and methods), output shape and norms of weights."""

    name: str
    module: nn.Module | None
    output_shape: tuple[int, ...]  # the shape of one example, or of the first part if the output is a tuple
    norms: NormSource
    output_shapes: tuple[tuple[int, ...], ...] = ()  # the shapes of all parts of a tuple output
    names: Mapping[int, str] = field(default_factory=dict)  # the model's names of parameters and buffers, by id

    @property
    def output_numel(self) -> int:
        return math.prod(self.output_shape)

    def operator_norm(self, weight: Tensor, operator: Operator) -> float:
        """Returns an upper bound on the norm of an operator.

        The norm is stored under the name that the model gives the weight, or under the operation's own name if the
        weight is neither a parameter nor a buffer.
        """
        return self.norms.operator_norm(self.names.get(id(weight), self.name), weight, operator)

    def inner_dims(self, dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
        """Returns dimensions counted from the first one after the batch; refuses the batch dimension and an empty list.

        If no dimension is named, torch reduces over all of them, rolls all of them, or does nothing.

        Args:
            dims: The dimensions that the operation names.
            rank: The number of dimensions of one example.

        Raises:
            Unbounded: If the operation does not name dimensions of an example alone.
        """
        listed = (dims,) if isinstance(dims, int) else () if dims is None else tuple(dims)
        if not listed:
            raise Unbounded(
                "without a dimension it works over all dimensions, the batch among them",
                "name the dimensions, dim=1 or later",
            )
        if not all(isinstance(d, int) and not isinstance(d, bool) for d in listed):
            raise Unbounded(f"its dimensions {listed} are not integers", "name the dimensions, dim=1 or later")
        if not all(-rank - 1 <= d <= rank for d in listed):
            raise Unbounded(f"dim {listed} is not one of {rank + 1} dimensions", "name a dimension that exists")
        positive = tuple(d % (rank + 1) for d in listed)
        if 0 in positive:
            raise Unbounded(
                f"it works along dim {listed}, which includes the batch, and so mixes examples",
                "use dimensions 1 and later only",
            )
        if len(set(positive)) < len(positive):
            raise Unbounded(f"dim {listed} names a dimension twice", "name each dimension once")
        return tuple(d - 1 for d in positive)


def public_number(value: object) -> float:
    """Returns an argument that must be a public, finite number; raises Unbounded for everything else."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise Unbounded(f"{value!r} is not a public, finite number", "give a number that is part of the code")
    return float(value)


def full_precision(*options: object) -> None:
    """Refuses casts to other dtypes than float32 and float64: they round too much for the margins, or to integers."""
    for option in options:
        if isinstance(option, torch.dtype) and option not in (torch.float32, torch.float64):
            raise Unbounded(f"it casts to {option}", "compute in float32, or under the trainer's precision")
        if isinstance(option, Value | Constant | Tensor):
            raise Unbounded("it takes the dtype of another tensor", "name the dtype")


@dataclass(frozen=True)
class BatchNumber:
    """A number made from the batch size: ``factor`` times it, or any other number if ``factor`` is None.

    Arithmetic is carried out if it gives a multiple of the batch size, or a public number, at every batch size. All
    other arithmetic raises a TypeError.
    """

    factor: int | None

    def at(self, batch: int) -> int | None:
        """Returns the number at this batch size, or None if it is not known."""
        return None if self.factor is None else self.factor * batch

    def __mul__(self, other: object) -> BatchNumber | int:
        if self.factor is None or not isinstance(other, int):
            return NotImplemented
        return _multiple(self.factor * other)

    __rmul__ = __mul__

    def __add__(self, other: object) -> BatchNumber | int:
        theirs = _factor(other)
        return NotImplemented if self.factor is None or theirs is None else _multiple(self.factor + theirs)

    def __sub__(self, other: object) -> BatchNumber | int:
        theirs = _factor(other)
        return NotImplemented if self.factor is None or theirs is None else _multiple(self.factor - theirs)

    def __neg__(self) -> BatchNumber | int:
        return self * -1

    def __pos__(self) -> BatchNumber | int:
        return self * 1

    def __floordiv__(self, other: object) -> BatchNumber | int:
        """Divides if nothing remains."""
        divisor = other if isinstance(other, int) else _factor(other)
        if self.factor is None or not divisor or self.factor % divisor:
            return NotImplemented
        quotient = self.factor // divisor
        return _multiple(quotient) if isinstance(other, int) else quotient

    def __truediv__(self, other: object) -> float:
        divisor = _factor(other)
        return NotImplemented if self.factor is None or not divisor else self.factor / divisor


def _factor(value: object) -> int | None:
    return value.factor if isinstance(value, BatchNumber) else None


def _multiple(factor: int) -> BatchNumber | int:
    return BatchNumber(factor) if factor else 0


UNKNOWN = BatchNumber(None)


def counts_examples(value: object) -> bool:
    """Returns whether a number, or a number inside a tuple or a slice, is made from the batch size."""
    if isinstance(value, slice):
        return any(map(counts_examples, (value.start, value.stop, value.step)))
    if isinstance(value, tuple | list):
        return any(map(counts_examples, value))
    return isinstance(value, BatchNumber)
