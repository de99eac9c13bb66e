"""The table of rules: each operation has one short function, found by module class, function or method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TypeVar

from torch import fx, nn

from .values import Bound, Operation, Value

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
