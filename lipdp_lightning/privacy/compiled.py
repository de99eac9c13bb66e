"""Loops over arrays, compiled to machine code by numba: one source, for one thread and for several.

Nothing is reordered and nothing contracted: every operation is rounded as IEEE 754 says, so that what a loop returns is
the same on every processor and for every number of threads. The machine code is kept beside the source, or in the
user's cache directory where that cannot be written. It is made anew when the file of a loop has changed, and only then:
what a loop is made of stands in its own file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numba

_ONE_AT_A_TIME = threading.Lock()  # not every pool of threads that numba may find can be used by two callers at once


class Loop:
    """A function whose outermost loop is a ``prange``; ``shared`` runs it on several threads.

    Compiled for its signatures when it is defined: a module of loops takes about a second to import for the first time,
    and milliseconds afterwards.
    """

    def __init__(self, function: Callable[..., None], signatures: list[str]) -> None:
        self.source, self.alone = function, _compiled(function, signatures, parallel=False)
        self._several = _compiled(function, signatures, parallel=True)

    def shared(self, threads: int, *arguments: Any) -> None:
        if threads == 1:
            return self.alone(*arguments)
        with _ONE_AT_A_TIME:
            numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
            self._several(*arguments)


def loop(*signatures: str) -> Callable[[Callable[..., None]], Loop]:
    return lambda function: Loop(function, list(signatures))


def _compiled(function: Callable[..., None], signatures: list[str], parallel: bool) -> Callable[..., None]:
    if parallel:  # under a name of its own: the cache tells functions apart by name and signature, not by options
        function = FunctionType(function.__code__, function.__globals__)
        function.__qualname__ += "_shared"
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "parallel": parallel}
    try:
        return numba.njit(signatures, cache=True, **options)(function)
    except RuntimeError:  # no directory for the cache
        return numba.njit(signatures, **options)(function)
