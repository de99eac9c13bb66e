"""Decides between a compiled loop, a GPU's kernel, what torch compiles, and torch's own operations."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter, methodcaller
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


@lru_cache(maxsize=1)
def cpu_loops() -> ModuleType:
    """Returns the compiled loops; the first call imports numba, and compiles them where they are not cached.

    That takes about half a second, which a command that computes nothing should not pay.
    """
    from . import cpu

    return cpu


def gpu_kernels(device: torch.device) -> ModuleType | None:
    """Returns the kernels for tensors on this device; None on a CPU, and where Triton is not installed.

    None, too, on AMD's GPUs, for which torch has the same name: their machine code has not been looked at.
    """
    return _triton_kernels() if device.type == "cuda" and torch.version.hip is None else None


@lru_cache(maxsize=1)
def _triton_kernels() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from . import gpu

    return gpu


@lru_cache(maxsize=1)
def _found() -> bool:
    from .cpu import openmp

    return openmp() is not None


def usable(*tensors: Tensor) -> bool:
    """Returns whether a loop may read these tensors.

    They must lie in a CPU's memory as contiguous float32, no gradient may flow through what is computed from them, and
    no compiler or transformation may be tracing, since none of these sees what a loop does.
    """
    if is_traced():
        return False
    followed = torch.is_grad_enabled()
    for tensor in tensors:
        if type(tensor) not in _PLAIN_TYPES or (followed and tensor.requires_grad) or not _is_plain(tensor):
            return False
    return _found()


def is_traced() -> bool:
    """Returns whether torch.compile or torch.func is looking on."""
    return torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.dtype is torch.float32
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


version_of, address_of = attrgetter("_version"), methodcaller("data_ptr")
"""One of the two changes if torch writes to a tensor's memory, or replaces it; a write through ``tensor.data`` changes
neither."""


class Fused:
    """A definition in torch's operations, which a GPU runs in one pass over memory, or in few.

    On other devices, under another compiler, and from then on where the compiler fails, the definition runs as it is
    written. Gradients do not flow through it: it is for norms, and for the two directions of an ``autograd.Function``,
    each of which has a definition.

    Args:
        definition: A function whose first argument is a tensor.
    """

    def __init__(self, definition: Callable[..., Any]) -> None:
        self._definition = definition
        self._compiled: Any = None
        self._failed = False

    def __call__(self, x: Tensor, *more: Any) -> Any:
        if not x.is_cuda or self._failed or is_traced():
            return self._definition(x, *more)
        try:
            if self._compiled is None:  # for all sizes at once: those of Poisson samples differ from step to step
                self._compiled = torch.compile(self._definition, dynamic=True, fullgraph=True)
            return self._compiled(x, *more)
        except Exception as error:
            found = self._definition(x, *more)  # raises if it was not the compiler that failed
            self._failed = True
            name, reason = getattr(self._definition, "__name__", "a definition"), " ".join(str(error).split())[:200]
            warnings.warn(
                f"torch.compile failed for {name} ({type(error).__name__}: {reason}); it runs as torch's own "
                "operations, with the same results and more passes over memory. HINT: run `lipdp doctor`.",
                RuntimeWarning, stacklevel=2,
            )  # fmt: skip
            return found
