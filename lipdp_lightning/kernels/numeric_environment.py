"""Names what decides the last bits of a sum besides the program: libraries, processor and switches."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import math
import os
import platform
from functools import lru_cache
from pathlib import Path

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
        "library for matrices": _called(getattr(backends.cuda, "preferred_blas_library", None)),
        "library for linear algebra": _called(getattr(backends.cuda, "preferred_linalg_library", None)),
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


def _called(setting: object) -> object:
    return setting() if callable(setting) else None


@lru_cache(maxsize=1)
def _of_the_cpu() -> bytes:
    """Returns what decides the last bits on a CPU: torch, and the vector unit it uses.

    torch chooses its functions when it is loaded, so they are identified by what they return.
    """
    parts = (torch.__version__, torch.backends.cpu.get_cpu_capability(), platform.machine())
    values = torch.arange(1, 4097, dtype=torch.float64, device="cpu") / 4097
    returned = torch.cat([values.log(), values.sqrt(), (values * math.pi).sin(), (values * math.pi).cos()])
    return "|".join(parts).encode() + hashlib.sha256(returned.numpy().tobytes()).digest()
