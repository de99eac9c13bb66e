"""Loops over arrays, compiled to machine code by numba: one source, for one thread and for several.

Every operation is rounded as IEEE 754 says, none is contracted with another, and none is moved unless a loop says that
its sum may be taken in any order: what any other loop returns is the same on every processor and for every number of
threads. The machine code is kept beside the source, or in the user's cache directory where that cannot be written. It
is made anew when the file of a loop has changed, and only then: what a loop is made of stands in its own file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from types import FunctionType
from typing import Any

import numba

_ONE_AT_A_TIME = threading.Lock()  # not every pool of threads that numba may find can be used by two callers at once


class Loop:
    """A compiled function; ``shared`` runs its outermost loop, a ``prange``, on several threads.

    Compiled for its signatures when it is defined: a module of loops takes about a second to import for the first time,
    and milliseconds afterwards. Not to be shared while torch's threads work on a processor: they wait by turning.
    """

    def __init__(self, function: Callable[..., None], signatures: list[str], fastmath: set[str]) -> None:
        self._function, self._signatures, self._fastmath = function, signatures, fastmath
        self.alone = self._compiled(function, parallel=False)

    def shared(self, threads: int, *arguments: Any) -> None:
        if threads == 1:
            return self.alone(*arguments)
        with _ONE_AT_A_TIME:
            numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
            self._several(*arguments)

    @cached_property
    def _several(self) -> Callable[..., None]:
        # under a name of its own: the cache tells functions apart by name and signature, not by options
        function = FunctionType(self._function.__code__, self._function.__globals__)
        function.__qualname__ += "_shared"
        return self._compiled(function, parallel=True)

    def _compiled(self, function: Callable[..., None], parallel: bool) -> Callable[..., None]:
        options: dict[str, Any] = {
            "nogil": True, "error_model": "numpy", "parallel": parallel, "fastmath": self._fastmath,
        }  # fmt: skip
        try:
            return numba.njit(self._signatures, cache=True, **options)(function)
        except RuntimeError:  # no directory for the cache
            return numba.njit(self._signatures, **options)(function)


def loop(*signatures: str, any_order: bool = False) -> Callable[[Callable[..., None]], Loop]:
    """``any_order``: sums may be reordered, which vector instructions need; their rounding is bounded all the same."""
    return lambda function: Loop(function, list(signatures), {"reassoc"} if any_order else set())
