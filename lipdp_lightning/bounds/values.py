"""What a rule sees and what it answers: bounds on one example's values, never the values themselves.

A walk makes several of these for every node of a graph, at every step: they are not frozen, which would take four times
as long, and nobody changes one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..norms.operators import NormSource as NormSource
from ..norms.operators import Operator


class Unbounded(Exception):
    """An operation that cannot be certified; collected over the whole model and reported at once."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


@dataclass
class Value:
    """A tensor that depends on an example: ``norm`` bounds the l2 norm of one example's part of it."""

    norm: float
    shape: tuple[int, ...]  # of one example, without the batch dimension

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
    """What a rule answers.

    ``norm`` bounds one example's output; ``lipschitz`` bounds the operation's Jacobian in each argument
    slot that holds a Value, in the order in which the operation reads them (one number serves a single
    slot). With ``quadrature`` the slots fill disjoint parts of the output, as the inputs of ``cat`` do,
    and combine by root of squares. ``cotangent_cap`` bounds the cotangent that the operation passes on,
    whatever it receives. ``parts`` holds one output bound for each member of a tuple output.
    """

    norm: float
    lipschitz: float | tuple[float, ...]
    uses: tuple[ParameterUse, ...] = ()
    quadrature: bool = False
    cotangent_cap: float = math.inf
    parts: tuple[float, ...] = ()
    slots: tuple[float, ...] = field(init=False, repr=False)  # ``lipschitz``, one number for each slot

    def __post_init__(self) -> None:
        self.slots = self.lipschitz if isinstance(self.lipschitz, tuple) else (self.lipschitz,)


def with_margin(bound: Bound, margin: float) -> Bound:
    """What a rule answers, with the rounding of the operation."""
    slots, uses, parts = bound.slots, bound.uses, bound.parts
    return Bound(
        bound.norm * margin,
        (slots[0] * margin,) if len(slots) == 1 else tuple([s * margin for s in slots]),
        tuple([ParameterUse(u.parameters, u.gradient_factor * margin) for u in uses]) if uses else (),
        bound.quadrature,
        bound.cotangent_cap * margin,
        tuple([p * margin for p in parts]) if parts else (),
    )


def _nameless(tensor: Tensor) -> str | None:
    return None


@dataclass(frozen=True)
class Operation:
    """The node at hand: its module (None for functions and methods), output shape and norms of weights."""

    name: str
    module: nn.Module | None
    output_shape: tuple[int, ...]  # of one example; of the first part where the output is a tuple
    norms: NormSource
    output_shapes: tuple[tuple[int, ...], ...] = ()  # of every part of a tuple output
    name_of: Callable[[Tensor], str | None] = _nameless  # of a parameter or buffer that the model holds

    @property
    def output_numel(self) -> int:
        return math.prod(self.output_shape)

    def operator_norm(self, weight: Tensor, operator: Operator) -> float:
        """Returns an upper bound on the norm of an operator; the weight is known by the name that the model gives it.

        A constant that is neither a parameter nor a buffer is known by the operation that reads it.
        """
        return self.norms.operator_norm(self.name_of(weight) or self.name, weight, operator)

    def inner_dims(self, dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
        """Dimensions counted from the first one after the batch; refuses the batch dimension, and an empty list.

        Where no dimension is named, torch reduces over all of them, rolls all of them, or does nothing.
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
    """The value of an argument that must be a public, finite number; raises Unbounded for everything else."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise Unbounded(f"{value!r} is not a public, finite number", "give a number that is part of the code")
    return float(value)


def full_precision(*options: object) -> None:
    """Casts below float32 round values up by more than the margins allow; integers have no gradient."""
    for option in options:
        if isinstance(option, torch.dtype) and option not in (torch.float32, torch.float64):
            raise Unbounded(f"it casts to {option}", "compute in float32, or under the trainer's precision")
        if isinstance(option, Value | Constant | Tensor):
            raise Unbounded("it takes the dtype of another tensor", "name the dtype")


def root_of_squares(values: Sequence[float]) -> float:
    return math.hypot(*values) if values else 0.0


@dataclass(frozen=True)
class BatchNumber:
    """``factor`` times the batch size at every batch size; with no factor, any other number made from it.

    Arithmetic that gives a multiple of the batch size, or a public number, at every batch size is carried out. All
    other arithmetic raises a TypeError.
    """

    factor: int | None

    def at(self, batch: int) -> int | None:
        """Returns the number at this batch size, or None where it is not known."""
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
        """Divides where nothing remains."""
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
    """Whether a number, or a number inside a tuple or a slice, is made from the batch size."""
    if isinstance(value, slice):
        return any(map(counts_examples, (value.start, value.stop, value.step)))
    if isinstance(value, tuple | list):
        return any(map(counts_examples, value))
    return isinstance(value, BatchNumber)
