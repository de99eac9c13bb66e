"""Rules: their arguments and results, and the table that finds the rule of each operation.

Rules compute with bounds on one example's values, and never with the values themselves. Each operation has one short
function, found by module class, function or method. A walk makes several of these objects for every node at every step.
Frozen objects would take four times as long to make, so some are not frozen; nothing changes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import TypeVar

import torch
from torch import Tensor, fx, nn

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


# ---- the table

Rule = Callable[..., Bound]
Target = type | Callable[..., object] | str
R = TypeVar("R", bound=Rule)
Function = Callable[..., object]
S = TypeVar("S", bound=Function)


@dataclass(frozen=True)
class Refusal:
    """The reason why an operation can never be certified, and the fix."""

    reason: str
    hint: str


_RULES: dict[Target, Rule] = {}
_REFUSALS: dict[Target, Refusal] = {}
_TAKES_BATCH_SIZE: set[Target] = set()
_IN_PIECES: dict[Target, Function] = {}


def rule(*targets: Target, takes_batch_size: bool = False) -> Callable[[R], R]:
    """Registers a rule for module classes, functions (``torch.relu``) and tensor methods (``"relu"``).

    The rule takes the :class:`Operation` and then the operation's own arguments, with a :class:`Value`
    in place of every tensor that depends on an example, and returns a :class:`Bound`. A module's rule
    finds the module at ``op.module``. Rules of a subclass win over those of its parents.

    Numbers made from the batch size, which is private, are refused before the rule sees them. With
    ``takes_batch_size`` the rule of a function or method receives them, as :class:`BatchNumber`, and must refuse each
    one that does more than name the first dimension.

    Args:
        targets: The operations.
        takes_batch_size: Whether the rule receives numbers made from the batch size.

    Raises:
        ValueError: If an operation has a rule already.
    """

    def register(function: R) -> R:
        for target in dict.fromkeys(targets):  # torch exports some functions under two names
            if target in _RULES:
                raise ValueError(
                    f"{target!r} has a rule already: {_RULES[target].__name__}. HINT: subclass the module and "
                    "register the subclass; two rules for one operation would leave open which one certifies."
                )
            _RULES[target] = function
            if takes_batch_size:
                _TAKES_BATCH_SIZE.add(target)
        return function

    return register


def module_rule_of(*kinds: type[nn.Module], options: tuple[str, ...] = ()) -> Callable[[R], R]:
    """Registers the rule of a function for modules, too, which call the function with some of their attributes.

    Args:
        kinds: The module classes.
        options: The attributes of the module that are passed as arguments of the same names.

    Example::

        @rule(F.celu)
        @module_rule_of(nn.CELU, options=("alpha",))
        def celu(op: Operation, x: Value, alpha: float = 1.0) -> Bound: ...
    """

    def register(function: R) -> R:
        @rule(*kinds)
        @wraps(function)
        def of_module(op: Operation, x: Value) -> Bound:
            return function(op, x, **{name: getattr(op.module, name) for name in options})

        return function

    return register


def refuse(*targets: Target, reason: str, hint: str) -> None:
    """Registers the reason and the fix for operations that no rule can bound."""
    for target in targets:
        _REFUSALS[target] = Refusal(reason, hint)


def module_rule(kind: type[nn.Module]) -> Rule | Refusal | None:
    """Returns the rule or refusal of a module class, looked up along its bases, nearest first.

    A subclass that computes something else than the base does not inherit its rule: tracing enters it, or it needs a
    rule of its own.
    """
    for base in kind.__mro__:
        if base is nn.Module:
            return None
        if base in _RULES:
            return _RULES[base] if _computes_alike(kind, base) else None
        if base in _REFUSALS:
            return _REFUSALS[base]
    return None


_HARMLESS = frozenset({"extra_repr", "reset_parameters"})


def _computes_alike(kind: type, base: type) -> bool:
    """Returns whether no class between the two overrides a method of the base or turns an attribute into a property."""
    inherited = {"forward", "__call__"}
    for ancestor in base.__mro__:
        if ancestor not in (nn.Module, object):
            inherited |= {n for n in vars(ancestor) if not n.startswith("__")}
    own = (item for between in kind.__mro__ if not issubclass(base, between) for item in vars(between).items())
    return not any(
        (name in inherited and name not in _HARMLESS) or (isinstance(value, property) and name != "__dict__")
        for name, value in own
    )


def function_rule(target: Target) -> Rule | Refusal | None:
    """Returns the rule or refusal of a function or a method."""
    return _RULES.get(target) or _REFUSALS.get(target)


def takes_batch_size(target: Target) -> bool:
    """Returns whether the operation's rule receives numbers that are made from the batch size."""
    return target in _TAKES_BATCH_SIZE


def registered() -> tuple[Target, ...]:
    """Returns every operation that has a rule."""
    return tuple(_RULES)


def sums_in_pieces(*targets: Function) -> Callable[[S], S]:
    """Registers what a certified graph calls in place of functions of torch that read a trained parameter.

    The function computes the same, and sums the parameter's gradient over the batch so that the margin of a sum covers
    the rounding.

    Args:
        targets: The functions of torch.
    """

    def register(function: S) -> S:
        _IN_PIECES.update(dict.fromkeys(targets, function))
        return function

    return register


def in_pieces(target: Target) -> Function | None:
    """Returns what a certified graph calls in place of a function of torch that reads a trained parameter."""
    return _IN_PIECES.get(target)


@dataclass(frozen=True)
class Step:
    """A node that depends on the example, prepared once.

    Attributes:
        node: The node.
        rule: Its rule; None for the input and for a member of a tuple.
        reads: The nodes in its argument slots that depend on the example.
        operation: The description of the node that its rule receives.
        path: The path of its module; empty if that is the model itself.
        scalable: Whether its module can measure and scale its gradient by example.
        trained: The trained parameters that it holds or reads.
    """

    node: fx.Node
    rule: Rule | None
    reads: tuple[fx.Node, ...]
    operation: Operation
    path: str
    scalable: bool
    trained: frozenset[nn.Parameter]

    @property
    def module(self) -> nn.Module | None:
        return self.operation.module
