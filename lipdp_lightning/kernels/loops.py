"""Decides between a compiled loop, a GPU's kernel and torch's own operations."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from types import ModuleType

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
    from .threads import openmp

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
