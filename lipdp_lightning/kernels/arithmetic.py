"""The switches that let torch round more than the certificate's margins allow for, and what they must be.

A certificate allows for float32 products that are rounded as float32, and for sums of bfloat16 products that are formed
in float32. torch has several spellings of every switch; setting one does not set the others, and a later default may
undo one. So each is set, and each is read again before a step is released.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

_IEEE = (
    "fp32_precision", "cuda.matmul.fp32_precision", "cudnn.fp32_precision", "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision", "mkldnn.fp32_precision", "mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision",
    "mkldnn.rnn.fp32_precision",
)  # fmt: skip
"""Settings of newer versions of torch, below ``torch.backends``."""

_OFF = (
    "cuda.matmul.allow_tf32", "cudnn.allow_tf32", "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_reduced_precision_reduction", "cuda.matmul.allow_fp16_accumulation",
)  # fmt: skip

_TENSOR_CORES = ("cuda.matmul.allow_tf32", "cudnn.allow_tf32")
"""They set the newer spellings, too, and not the other way round: cuBLAS refuses to work where the two disagree."""

_ENVIRONMENT = {
    "NVIDIA_TF32_OVERRIDE": ("", "0"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": ("", "0"),
    "ONEDNN_DEFAULT_FPMATH_MODE": ("", "STRICT"),
    "DNNL_DEFAULT_FPMATH_MODE": ("", "STRICT"),
}
"""Variables that libraries read by themselves, and what they may be."""


def require_exact_arithmetic() -> None:
    """Sets every switch of this process; what a variable of the environment forces cannot be set."""
    for path in _IEEE:
        _write(path, "ieee")
    for path in _OFF:
        _write(path, False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)


@contextmanager
def products_on_tensor_cores(allowed: bool) -> Iterator[None]:
    """Lets a GPU round the factors of products within the block to TF32, and form their sums on tensor cores.

    Only for products whose margin pays for it (``mechanism.allocation.sum_margin``). After the block, the switches are
    as ``require_exact_arithmetic`` leaves them, so that no check between two passes sees another state.
    """
    if not allowed:
        yield
        return
    try:
        for path in _TENSOR_CORES:
            _write(path, True)
        yield
    finally:
        for path in _TENSOR_CORES:
            _write(path, False)


def arithmetic_problems() -> list[str]:
    """Returns what rounds further than the certificate allows for, each with a hint; nothing if all is well."""
    return [
        f"{name} is {value!r}, and the certificate's margins are for {wanted!r}. HINT: {hint}"
        for name, value, wanted, hint in _found()
        if value != wanted
    ]


def check_exact_arithmetic() -> None:
    """Raises ValueError if a switch is not as ``require_exact_arithmetic`` has left it."""
    if _is_as_required():  # in half of the time: it is asked twice in every step
        return
    problems = arithmetic_problems()
    if problems:
        raise ValueError(
            "the arithmetic of this process is not that of the certificate, and a sum of gradients could be larger "
            "than the noise is for:\n" + "\n".join(problems)
        )


_WANTED = tuple((attrgetter(path), value) for paths, value in ((_IEEE, "ieee"), (_OFF, False)) for path in paths)


def _is_as_required() -> bool:
    """Returns whether no switch is in doubt; one that this version of torch does not have is looked at closer."""
    backends, chosen = torch.backends, os.environ
    try:
        return (
            all([read(backends) == wanted for read, wanted in _WANTED])
            and not any([name in chosen for name in _ENVIRONMENT])
            and getattr(backends.mkldnn, "allow_tf32", False) is not True
            and torch.get_float32_matmul_precision() == "highest"
            and not backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
        )
    except (AttributeError, RuntimeError):
        return False


_HINT = "leave it alone while a private run trains; set-up has set it."


def _found() -> Iterator[tuple[str, Any, Any, str]]:
    """Yields every switch with its value, what it must be, and what to do."""
    for path in _IEEE:
        if (value := _read(path)) is not None:
            yield f"torch.backends.{path}", value, "ieee", _HINT
    for path in _OFF:
        if (value := _read(path)) is not None:
            yield f"torch.backends.{path}", value, False, _HINT
    if _read("mkldnn.allow_tf32") is True:
        yield "torch.backends.mkldnn.allow_tf32", True, False, _HINT
    yield "torch.get_float32_matmul_precision()", _matmul_precision(), "highest", _HINT
    reduced = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    yield "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()", reduced, False, _HINT
    for name, allowed in _ENVIRONMENT.items():
        value = os.environ.get(name, "")
        wanted = value if value.upper() in allowed else allowed[-1]
        yield f"the environment's {name}", value, wanted, "unset it before the program starts."


def _read(path: str) -> Any:
    """Returns a setting, or None where this version of torch does not have it; text if its spellings disagree."""
    try:
        return attrgetter(path)(torch.backends)
    except AttributeError:
        return None
    except RuntimeError:
        return "set through several interfaces that disagree"


def _write(path: str, value: Any) -> None:
    *parents, name = path.split(".")
    try:
        holder = attrgetter(".".join(parents))(torch.backends) if parents else torch.backends
    except AttributeError:
        return
    if _read(path) is not None:
        setattr(holder, name, value)


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "set through several interfaces that disagree"
