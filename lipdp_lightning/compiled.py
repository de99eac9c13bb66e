"""Loops over arrays, compiled to machine code by numba: one source, for one thread and for several.

A loop's first two arguments say which part of how many it does; the parts are those of its threads. Every operation is
rounded as IEEE 754 says, none is contracted with another, and none is moved unless a loop says that its sum may be
taken in any order: what any other loop returns is the same on every processor and for every number of parts. The
machine code is kept beside the source, or in the user's cache directory where that cannot be written. It is made anew
when the file of a loop has changed, and only then: what a loop is made of stands in its own file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numba
import numpy as np

from . import team

Body = Callable[[Any], None]


class Loop:
    """A compiled function of (part, parts, arrays and numbers...); ``shared`` does its parts on several threads.

    Compiled for its signatures when it is defined: a module of loops takes about a second to import for the first time,
    and milliseconds afterwards.
    """

    def __init__(self, function: Callable[..., None], signatures: list[str], fastmath: set[str]) -> None:
        self.source = function
        self._body: Body | None = None
        options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
        self.compiled = _cached(numba.njit, signatures, function, **options)

    def alone(self, *arguments: Any) -> None:
        self.compiled(0, 1, *arguments)

    def shared(self, threads: int, *arguments: Any) -> None:
        """The same with ``threads`` parts, on torch's threads where they can be found."""
        if threads == 1 or self._body is None or not team.found():
            return self.alone(*arguments)
        fields = [threads]
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                fields += [argument.ctypes.data, *argument.shape]
            else:
                fields.append(int(np.float64(argument).view(np.int64)) if isinstance(argument, float) else argument)
        team.run(self._native.address, fields, threads)

    def body(self, function: Body) -> Body:
        """Decorates what a thread does: it reads (parts, arrays as address and shape, numbers) from 64-bit fields."""
        self._body = function
        return function

    @cached_property
    def _native(self) -> Any:
        return _cached(numba.cfunc, "void(voidptr)", self._body, error_model="numpy")


def loop(*signatures: str, any_order: bool = False) -> Callable[[Callable[..., None]], Loop]:
    """``any_order``: sums may be reordered, which vector instructions need; their rounding is bounded all the same."""
    return lambda function: Loop(function, list(signatures), {"reassoc"} if any_order else set())


def _cached(compiler: Any, signature: Any, function: Any, **options: Any) -> Any:
    try:
        return compiler(signature, cache=True, **options)(function)
    except RuntimeError:  # no directory for the cache
        return compiler(signature, **options)(function)
