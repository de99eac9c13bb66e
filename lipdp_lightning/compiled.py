"""Loops over arrays, compiled to machine code by numba: one source, for one thread and for several.

A loop's first two arguments say which part of how many it does; the parts are those of its threads. Every operation is
rounded as IEEE 754 says, none is contracted with another, and none is moved unless a loop says that its sum may be
taken in any order: what any other loop returns is the same on every processor and for every number of parts. The
machine code is kept beside the source, or in the user's cache directory where that cannot be written. It is made anew
when the file of a loop has changed, and only then: what a loop is made of stands in its own file, but for what it calls
of team.py, and the release's of box_muller.py. Who changes one of these deletes the ``*.nbi`` files beside the loops.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numba
import numpy as np

from . import team

Body = Callable[[Any], None]


class Loop:
    """A compiled function of (part, parts, arrays and numbers...); ``shared`` does its parts on several threads.

    Compiled for its signature when it is defined: a module of loops takes about a second to import for the first time,
    and milliseconds afterwards.
    """

    def __init__(self, function: Callable[..., None], signature: str, fastmath: set[str]) -> None:
        self._native: Any = None
        self._kinds = _kinds(signature)[2:]
        options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
        self.compiled = _cached(numba.njit, signature, function, **options)

    def alone(self, *arguments: Any) -> None:
        self.compiled(0, 1, *arguments)

    def shared(self, threads: int, *arguments: Any) -> None:
        """The same on up to ``threads`` of torch's threads, where they can be found."""
        fields = None if threads == 1 or self._native is None else self._fields(arguments)
        if fields is None:
            return self.alone(*arguments)
        team.run(self._native, fields, threads)

    def at(self, threads: int, *fields: int) -> None:
        """The same of what lies at addresses, without an object for each array: of an array its address and its shape.

        The caller answers for dtypes and layouts. For loops over arrays and whole numbers.
        """
        if self._native is None:
            return self.alone(*self._arrays(fields))
        team.run(self._native, fields, threads)

    def _fields(self, arguments: tuple[Any, ...]) -> list[int] | None:
        """What a body reads; None for what is not as in the signature."""
        fields: list[int] = []
        for argument, (dtype, dimensions) in zip(arguments, self._kinds, strict=True):
            if dimensions == 0:
                fields.append(int(np.array(argument, dtype=dtype).view(np.int64)))
            elif argument.dtype == dtype and argument.ndim == dimensions and argument.flags.c_contiguous:
                fields += [argument.__array_interface__["data"][0], *argument.shape]
            else:
                return None
        return fields

    def _arrays(self, fields: Sequence[int]) -> Iterator[Any]:
        """The arguments that a body would make of the fields."""
        left = iter(fields)
        for dtype, dimensions in self._kinds:
            first, shape = next(left), tuple(itertools.islice(left, dimensions))
            if dimensions:
                memory: Any = (ctypes.c_byte * (math.prod(shape) * dtype.itemsize)).from_address(first)
                yield np.frombuffer(memory, dtype).reshape(shape)
            else:
                yield first

    def body(self, function: Body) -> Body:
        """Decorates what a thread does: it reads the arguments from 64-bit fields, arrays as address and shape."""
        if team.found():
            self._native = _cached(numba.cfunc, "void(voidptr)", function, error_model="numpy")
        return function


def loop(signature: str, *, any_order: bool = False) -> Callable[[Callable[..., None]], Loop]:
    """``any_order``: sums may be reordered, which vector instructions need; their rounding is bounded all the same."""
    return lambda function: Loop(function, signature, {"reassoc"} if any_order else set())


def _kinds(signature: str) -> list[tuple[np.dtype[Any], int]]:
    """Dtype and number of dimensions of every argument: "void(int64, float32[:, ::1])" has (int64, 0), (float32, 2)."""
    arguments = re.findall(r"(\w+)(\[[^]]*\])?", signature.removeprefix("void"))
    return [(np.dtype(name), layout.count(":") - layout.count("::")) for name, layout in arguments]


def _cached(compiler: Any, signature: Any, function: Any, **options: Any) -> Any:
    try:
        return compiler(signature, cache=True, **options)(function)
    except RuntimeError:  # no directory for the cache
        return compiler(signature, **options)(function)
