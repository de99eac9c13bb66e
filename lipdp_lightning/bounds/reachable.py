"""What a function's code can reach by name: globals, attributes of modules, other methods of its class."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from torch import nn

Namespace = dict[str, Any]


def reachable_names(function: types.FunctionType) -> Iterator[tuple[Namespace, str]]:
    """Each global name that the code reads, and where: of its own module, or as an attribute of a module it names."""
    names = set(_names(function.__code__))
    found = {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}
    for name, value in found.items():
        yield function.__globals__, name
        if isinstance(value, types.ModuleType):
            for attribute in sorted(names & vars(value).keys()):
                yield vars(value), attribute


def cell_contents(function: Any) -> tuple[object, ...]:
    """What a function closes over, as far as it is assigned."""
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return tuple(found)


def methods_called(kind: type) -> set[str]:
    """The names on a module's class that its forward pass may read, directly or through other methods."""
    members = {name: value for base in reversed(kind.__mro__) for name, value in base.__dict__.items()}
    found: set[str] = set()
    open_names = {"forward", "__call__", "__getattr__"} & members.keys()
    while open_names:
        name = open_names.pop()
        found.add(name)
        value = members[name]
        function = getattr(value, "__func__", getattr(value, "fget", value))
        code = getattr(function, "__code__", None)
        if code is not None and members[name] not in (nn.Module.__call__, nn.Module.__getattr__):
            open_names |= (set(_names(code)) & members.keys()) - found
    return found


def _names(code: types.CodeType) -> Iterator[str]:
    """Names in the code, and in the functions and comprehensions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
