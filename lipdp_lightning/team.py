"""The threads that torch computes with on a CPU.

Threads of another pool would share the processors with them: those of OpenMP wait for their next work by turning.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite.binding
import torch
from numba import carray as carray  # type: ignore[attr-defined]
from numba import njit, types
from numba.extending import intrinsic

_NUMBER, _COUNT = "lipdp_number_of_thread", "lipdp_count_of_threads"


@lru_cache(maxsize=1)
def _openmp() -> Any:
    """The library whose threads torch uses, by way of the interface that GNU's and LLVM's have; None if it has none."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            library = ctypes.CDLL(str(path))  # loaded already: its symbols are those of what it is linked with
            symbols = {_NUMBER: library.omp_get_thread_num, _COUNT: library.omp_get_num_threads}
            library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            library.GOMP_parallel.restype = None
        except (OSError, AttributeError):
            continue
        for name, function in symbols.items():
            llvmlite.binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
        return library
    return None


def found() -> bool:
    return _openmp() is not None


def run(native: Any, fields: Sequence[int], threads: int) -> None:
    """Call the machine code with the fields, on each of ``threads`` threads, or of fewer; one is the caller's own.

    OpenMP may give fewer than it is asked for: within another team, or where the environment limits them. Who divides
    work among them asks ``thread_count`` on the thread, or some of it would never be done.
    """
    data = array("q", fields)
    if threads == 1:
        native.ctypes(data.buffer_info()[0])
    else:
        _openmp().GOMP_parallel(native.address, data.buffer_info()[0], threads, 0)


thread_number: Any = types.ExternalFunction(_NUMBER, types.int32())
thread_count: Any = types.ExternalFunction(_COUNT, types.int32())


def _pointer_at(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), generate


pointer_at: Any = intrinsic(_pointer_at)
"""In compiled code, the pointer of an address."""


@njit
def share(length: Any, part: Any, parts: Any) -> Any:
    """Where the part's share of ``length`` begins and ends."""
    return length * part // parts, length * (part + 1) // parts
