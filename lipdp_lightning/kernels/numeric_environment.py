"""Names what decides the last bits of a sum besides the program, and sets the switches that round too much.

A certificate allows for float32 products that are rounded as float32, and for sums of bfloat16 products that are formed
in float32. torch has several spellings of every switch; setting one does not set the others, and a later default may
undo one. So each is set, and each is read again before a step is released.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import math
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

_CPU = torch.device("cpu")
_DRIVER = Path("/proc/driver/nvidia/version")
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
REPEATING_WORKSPACES = (":4096:8", ":16:8")
"""Configurations with which cuBLAS repeats its bits, by its documentation."""


def numeric_environment(device: torch.device = _CPU) -> bytes:
    """Returns a name of all that decides the last bits of a sum on this device.

    A replay elsewhere may differ in the last bit of what the noise is added to, and is then not the same release. As
    part of a step's digest, this makes such a replay draw fresh noise. On a GPU, switches are read anew at every call.
    """
    if device.type == "cpu":
        return _of_the_cpu()
    facts = "|".join(f"{name}={value}" for name, value in gpu_facts(device).items())
    return _of_the_cpu() + f"|{device.type}|{facts}".encode()


def repeats_bits(device: torch.device) -> bool:
    """Tells whether a step that is taken again from the same state, on the same machine, has the same bits.

    On a CPU it has. On a GPU, torch must be told to use deterministic algorithms alone, cuDNN must not choose an
    algorithm by how fast it is now, and cuBLAS needs a workspace of its own for each stream.
    """
    return device.type == "cpu" or (
        device.type == "cuda"
        and torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
        and not torch.backends.cudnn.benchmark
        and os.environ.get(_WORKSPACE) in REPEATING_WORKSPACES
    )


def require_repeated_bits() -> None:
    """Lets GPUs repeat their bits; to be called before a GPU multiplies matrices for the first time.

    Raises:
        ValueError: if the environment asks cuBLAS for a workspace with which it does not repeat them.
    """
    chosen = os.environ.setdefault(_WORKSPACE, REPEATING_WORKSPACES[0])
    if chosen not in REPEATING_WORKSPACES:
        raise ValueError(
            f"the environment's {_WORKSPACE} is {chosen!r}, with which cuBLAS does not repeat its bits, and "
            f"privacy.deterministic asks for that. HINT: unset it, or {' or '.join(REPEATING_WORKSPACES)}."
        )
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def gpu_facts(device: torch.device) -> dict[str, str]:
    """Returns by name what decides how a GPU rounds: the device, its software, and the switches as they are now."""
    backends = torch.backends
    switches = {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "warnings only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cuDNN enabled": backends.cudnn.enabled,
        "cuDNN benchmark": backends.cudnn.benchmark,
        "cuDNN benchmark limit": getattr(backends.cudnn, "benchmark_limit", None),
        "cuDNN deterministic": backends.cudnn.deterministic,
        "library for matrices": _setting(backends.cuda, "preferred_blas_library"),
        "library for linear algebra": _setting(backends.cuda, "preferred_linalg_library"),
        _WORKSPACE: os.environ.get(_WORKSPACE, ""),
    }
    return dict(_of_the_gpu(device)) | {name: str(value) for name, value in switches.items()}


@lru_cache(maxsize=16)
def _of_the_gpu(device: torch.device) -> tuple[tuple[str, str], ...]:
    properties = torch.cuda.get_device_properties(device)
    return (
        ("device", torch.cuda.get_device_name(device)),
        ("capability", str(torch.cuda.get_device_capability(device))),
        ("multiprocessors", str(properties.multi_processor_count)),
        ("memory", str(properties.total_memory)),
        ("driver", _driver()),
        ("CUDA", f"{torch.version.cuda} {torch.version.hip}"),
        ("cuDNN", str(torch.backends.cudnn.version())),
        ("Triton", _version_of("triton")),
    )


def _driver() -> str:
    """Returns the version of NVIDIA's driver, or of the interface that it offers where it does not say its own."""
    try:
        return _DRIVER.read_text().splitlines()[0]
    except (OSError, IndexError):
        pass
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return "unknown"
    return str(version.value)


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@cache
def _of_the_cpu() -> bytes:
    """Returns what decides the last bits on a CPU: torch, and the vector unit it uses.

    torch chooses its functions when it is loaded, so they are identified by what they return.
    """
    parts = (torch.__version__, torch.backends.cpu.get_cpu_capability(), platform.machine())
    values = torch.arange(1, 4097, dtype=torch.float64, device="cpu") / 4097
    returned = torch.cat([values.log(), values.sqrt(), (values * math.pi).sin(), (values * math.pi).cos()])
    return "|".join(parts).encode() + hashlib.sha256(returned.numpy().tobytes()).digest()


# ---- the arithmetic of a certificate

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
    for _, holder, name, wanted in _switches():
        setattr(holder, name, wanted)
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
    cores = [(holder, name) for path, holder, name, _ in _switches() if path in _TENSOR_CORES]
    try:
        for holder, name in cores:
            setattr(holder, name, True)
        yield
    finally:
        for holder, name in cores:
            setattr(holder, name, False)


def arithmetic_problems() -> list[str]:
    """Returns what rounds further than the certificate allows for, each with a hint; nothing if all is well."""
    return [
        f"{name} is {value!r}, and the certificate's margins are for {wanted!r}. HINT: {hint}"
        for name, value, wanted, hint in _found()
        if value != wanted
    ]


def check_exact_arithmetic() -> None:
    """Raises ValueError if a switch is not as ``require_exact_arithmetic`` has left it."""
    problems = arithmetic_problems()
    if problems:
        raise ValueError(
            "the arithmetic of this process is not that of the certificate, and a sum of gradients could be larger "
            "than the noise is for:\n" + "\n".join(problems)
        )


_HINT = "leave it alone while a private run trains; set-up has set it."


def _found() -> Iterator[tuple[str, Any, Any, str]]:
    """Yields every switch with its value, what it must be, and what to do."""
    for path, holder, name, wanted in _switches():
        yield f"torch.backends.{path}", _setting(holder, name), wanted, _HINT
    if _setting(torch.backends.mkldnn, "allow_tf32") is True:
        yield "torch.backends.mkldnn.allow_tf32", True, False, _HINT
    yield "torch.get_float32_matmul_precision()", _setting(torch, "get_float32_matmul_precision"), "highest", _HINT
    reduced = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    yield "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()", reduced, False, _HINT
    for name, allowed in _ENVIRONMENT.items():
        value = os.environ.get(name, "")
        wanted = value if value.upper() in allowed else allowed[-1]
        yield f"the environment's {name}", value, wanted, "unset it before the program starts."


@cache
def _switches() -> list[tuple[str, Any, str, Any]]:
    """Returns the switches that this version of torch has: path, holder, name and what each must be."""
    found = []
    for path, wanted in (dict.fromkeys(_IEEE, "ieee") | dict.fromkeys(_OFF, False)).items():
        *parents, name = path.split(".")
        holder: Any = torch.backends
        for parent in parents:
            holder = getattr(holder, parent, None)
        if _setting(holder, name) is not None:
            found.append((path, holder, name, wanted))
    return found


def _setting(holder: Any, name: str) -> Any:
    """Returns a setting, None where this version of torch does not have it, and text if its spellings disagree."""
    try:
        value = getattr(holder, name, None)
        return value() if callable(value) else value
    except RuntimeError:
        return "set through several interfaces that disagree"
