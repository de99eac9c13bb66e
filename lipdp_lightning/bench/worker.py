"""Runs the process of one contender: python -m lipdp_lightning.bench.worker JOB, with the fields of a Job as JSON."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .contenders import OURS, Job, contender_named
from .peak_memory import Memory
from .step_parts import Parts
from .turns import Steps, WallClock, bind_to_processors, say

_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory")


class CudaClock(WallClock):
    """Measures seconds between events in the GPU's stream; the process waits for the GPU only at the end of a turn."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        marks[-1].synchronize()
        return [earlier.elapsed_time(later) / 1000 for earlier, later in itertools.pairwise(marks)]


class Facts:
    """Reports facts beside the times, and reacts to orders."""

    def __init__(self, job: Job, device: torch.device) -> None:
        rows = [(job.rows, *job.network.shape), (job.rows,)]
        self._memory, self._parts = Memory(device, rows), Parts(device) if job.parts else None
        if self._parts is not None:
            self._parts.install()
        self._parameters = sum(p.numel() for p in job.network.build().parameters())
        self._begun = False

    def __call__(self, order: dict[str, Any] | None) -> dict[str, Any]:
        if order is None:
            return {"parameters": self._parameters}
        if self._parts is not None:
            return {"parts": self._parts.take(), "beside": self._parts.take_beside()}
        return {"peak": self._memory.peak(), "set_up": self._memory.set_up}

    def on_order(self, order: dict[str, Any]) -> None:
        if not self._begun:
            self._begun = True
            self._memory.begin()
        if self._parts is not None:
            self._parts.begin()


def _touch(device: torch.device) -> None:
    """Loads the library code that every contender uses, so that it does not count as memory of the first step."""
    x = torch.rand(2, 3, 8, 8, device=device)
    kernel, weight = (torch.rand(*s, device=device, requires_grad=True) for s in ((4, 3, 3, 3), (10, 256)))
    features = F.conv2d(x, kernel, padding=1).relu().flatten(1)
    F.cross_entropy(features @ weight.t(), torch.zeros(2, dtype=torch.int64, device=device)).backward()


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def work(job: Job) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    device = torch.device(job.device)
    if device.type == "cpu":
        bind_to_processors(job.threads)
    else:
        torch.cuda.set_device(device)
        if job.memory_limit is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, job.memory_limit / total), device)
    clock = CudaClock() if device.type == "cuda" else WallClock()
    try:
        _touch(device)
        facts = Facts(job, device)
        contender_named(job.contender)(job, Steps(clock, facts, facts.on_order).between)
    except EOFError:
        return
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        say(**({"out_of_memory": reason} if is_out_of_memory(error) else {"failed": reason}))
        if job.contender in OURS and not is_out_of_memory(error):
            raise
        return
    say(failed="the contender returned before the measurement had ended")


if __name__ == "__main__":
    work(Job(**json.loads(sys.argv[1])))
