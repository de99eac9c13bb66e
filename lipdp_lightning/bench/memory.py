"""Peak memory of this process above what it held when it was set up, on a CPU or a GPU."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from contextlib import suppress

import torch

from .turns import resident_bytes


class Memory:
    """Peaks in bytes: of tensors on the GPU, else of what the process holds.

    Where the system lets a process forget its earlier peak, the peak counts from the set-up; else it is the largest
    since the start, which may have been reached in the set-up.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.base = 0

    def begin(self) -> None:
        """The set-up is complete."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self.base = torch.cuda.memory_allocated(self._device)
            return
        _give_back()
        _forget_peak()
        self.base = resident_bytes("self") or _largest_resident()

    def peak(self) -> int:
        """The largest amount since ``begin``, with the set-up."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(_peak_on_record() or _largest_resident(), self.base)


def _give_back() -> None:
    """What the set-up has freed goes to the system: steps that use it again would seem to need nothing."""
    gc.collect()
    with suppress(OSError, AttributeError, TypeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


def _forget_peak() -> None:
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _peak_on_record() -> int:
    try:
        with open("/proc/self/status") as file:
            lines = [line for line in file if line.startswith("VmHWM:")]
    except OSError:
        return 0
    return int(lines[0].split()[1]) * 1024 if lines else 0


def _largest_resident() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_bytes() -> int | None:
    """Memory that processes may still take without swapping; None where the system does not tell."""
    try:
        with open("/proc/meminfo") as file:
            lines = [line for line in file if line.startswith("MemAvailable:")]
    except OSError:
        return None
    return int(lines[0].split()[1]) * 1024 if lines else None
