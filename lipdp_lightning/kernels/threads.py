"""Runs compiled loops on the threads that torch itself computes with.

A pool of threads of our own would compete with torch's, which busy-wait for work between two operations. Loops are
therefore handed to the OpenMP library that torch has loaded.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import torch
from torch import Tensor

THREAD_NUMBER, THREAD_COUNT = "lipdp_thread_number", "lipdp_thread_count"
MOST_FIELDS = 16
_WORTH_SHARING = 1 << 15  # entries: a single thread has finished fewer before another one has started

Kind = tuple[torch.dtype, int]
"""The dtype and the number of dimensions of a tensor that a loop takes; 0 dimensions stand for a number."""


@lru_cache(maxsize=1)
def openmp() -> Any:
    """Returns the OpenMP library whose threads torch uses, or None if its interface is not found.

    GNU's and LLVM's libraries share the interface that is used here.
    """
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            library = ctypes.CDLL(str(path))  # already loaded: this finds the symbols of what it is linked with
            symbols = {THREAD_NUMBER: library.omp_get_thread_num, THREAD_COUNT: library.omp_get_num_threads}
            library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            library.GOMP_parallel.restype = None
        except (OSError, AttributeError):
            continue
        for name, function in symbols.items():
            llvmlite.binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
        return library
    return None


class Loop:
    """A compiled loop over tensors in a CPU's memory.

    Calling it with tensors and numbers runs its body on every thread of a team; the body finds out which thread it is,
    and reads its arguments from an array of 64-bit fields: the address and the shape of each tensor, and each number.
    The machine code is compiled when the loop is defined and kept beside its source file, or in the user's cache
    directory where that cannot be written.
    """

    def __init__(self, body: Callable[[Any], None], kinds: tuple[Kind, ...]) -> None:
        self._kinds = kinds
        self._native: Any
        try:
            self._native = numba.cfunc("void(voidptr)", error_model="numpy", cache=True)(body)
        except RuntimeError:  # there is no directory that the cache could be kept in
            self._native = numba.cfunc("void(voidptr)", error_model="numpy")(body)

    def __call__(self, entries: int, *arguments: Tensor | float) -> None:
        """Runs the loop, on several threads if there are many entries to work on.

        OpenMP may provide fewer threads than it is asked for, so a body divides its work by the number of threads that
        it finds itself in.
        """
        fields = array("q")
        for argument, (dtype, dimensions) in zip(arguments, self._kinds, strict=True):
            if dimensions:
                assert isinstance(argument, Tensor) and argument.dtype == dtype and argument.dim() == dimensions
                assert argument.is_cpu and argument.is_contiguous() and not argument.is_neg()
                fields.append(argument.data_ptr())
                fields.extend(argument.shape)
            elif dtype == torch.float64:
                fields.frombytes(array("d", (float(argument),)).tobytes())
            else:
                fields.append(int(argument))
        assert len(fields) <= MOST_FIELDS
        threads = 1 if entries < _WORTH_SHARING else torch.get_num_threads()
        if threads == 1:
            self._native.ctypes(fields.buffer_info()[0])
        else:
            openmp().GOMP_parallel(self._native.address, fields.buffer_info()[0], threads, 0)


def loop(*kinds: Kind) -> Callable[[Callable[[Any], None]], Loop]:
    """Decorates the body of a loop that takes tensors and numbers of these kinds."""
    assert openmp() is not None
    return lambda body: Loop(body, kinds)
