"""Measures the peak memory of a training, on a CPU or a GPU: its tensors at set-up, and what its steps add to them.

What a process holds is not what it needs: the C library keeps freed blocks, and batches of changing size leave it with
blocks that the next step cannot use. PROMPT makes it return them at once, which costs time.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections.abc import Collection
from contextlib import suppress

import torch

PROMPT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Settings of glibc under which blocks of 64 KiB and more are returned to the system when they are freed."""


class Memory:
    """Counts bytes of tensors on the GPU, or of what the process holds without mapped files, which are the code of
    libraries.

    ``set_up`` counts tensors that are alive at the set-up: weights, and whatever else a method keeps between steps.
    Tensors of the shapes ``rows``, which hold the training rows, are left out, and so are libraries and Python objects.
    If the system lets a process reset its peak, the peak counts from the set-up; otherwise it is the largest since the
    start, which may have been reached in the set-up.
    """

    def __init__(self, device: torch.device, rows: Collection[tuple[int, ...]] = ()) -> None:
        self._device, self._rows = device, rows
        self.base = self.set_up = 0

    def begin(self) -> None:
        """Marks the set-up as complete."""
        gc.collect()
        self.set_up = _tensors(self._device, self._rows)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self.base = torch.cuda.memory_allocated(self._device)
            return
        _give_back()
        _forget_peak()
        self.base = self._held("VmRSS")

    def peak(self) -> int:
        """Returns the largest amount since ``begin``: ``set_up``, and what the process held beyond its state then."""
        if self._device.type == "cuda":
            held = torch.cuda.max_memory_allocated(self._device)
        else:
            held = max(self._held("VmHWM"), self.base)
        return self.set_up + held - self.base

    @staticmethod
    def _held(total: str) -> int:
        status = _status()
        return status[total] - status.get("RssFile", 0) if total in status else _largest_resident()


def _tensors(device: torch.device, rows: Collection[tuple[int, ...]]) -> int:
    """Returns the bytes of all tensors that Python holds on the device, each storage once."""
    set_aside = (
        gc.get_freeze_count()
    )  # a run of this library freezes objects, which are not listed until they are unfrozen
    gc.unfreeze()
    alive = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and o.device.type == device.type]
    if set_aside:
        gc.freeze()
    sizes: dict[int, int] = {}
    for tensor in alive:
        if tuple(tensor.shape) not in rows:
            with suppress(NotImplementedError, RuntimeError):  # a wrapper or a trace has no memory of its own
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _give_back() -> None:
    """Returns the freed memory of the set-up to the system; steps that use it again would seem to need nothing."""
    with suppress(OSError, AttributeError, TypeError):  # there is no glibc
        ctypes.CDLL(None).malloc_trim(0)


def _forget_peak() -> None:
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _status() -> dict[str, int]:
    """Returns the amounts, in bytes, that the system reports about this process."""
    try:
        with open("/proc/self/status") as file:
            lines = [line.split() for line in file if line.endswith(" kB\n")]
    except OSError:
        return {}
    return {name.rstrip(":"): int(amount) * 1024 for name, amount, _ in lines}


def _largest_resident() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_bytes() -> int | None:
    """Returns the memory that processes may still take without swapping; None if the system does not tell."""
    try:
        with open("/proc/meminfo") as file:
            lines = [line for line in file if line.startswith("MemAvailable:")]
    except OSError:
        return None
    return int(lines[0].split()[1]) * 1024 if lines else None
