"""Measures the memory that a contender needs, apart from the timing, in a process that returns what it frees.

All contenders of a cell take the same number of steps on the same Poisson samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from .contender_process import started
from .contender_rows import Row
from .contenders import MEMORY_STEPS, Job


def measure_memory(jobs: Sequence[Job], rows: Sequence[Row], patience: float) -> None:
    """Writes the memory into the rows; a row that has a time and no memory says why."""
    with contextlib.ExitStack() as stack:
        entries = [(row, started(replace(job, memory=True))) for job, row in zip(jobs, rows, strict=True) if row.runs]
        for _, entry in entries:
            stack.callback(entry.worker.close)
        for _, entry in entries:
            entry.ready()
        for row, entry in entries:
            limit = patience * (MEMORY_STEPS + 1)
            report = entry.ask(limit, steps=MEMORY_STEPS, warm_up=0) if entry.row.runs else None
            if report is None:
                row.reason = f"no peak memory: {entry.row.status}, {entry.row.reason}"
            else:
                row.peak_memory, row.set_up_memory = report["peak"], report["set_up"]
            entry.worker.close()  # it must end before the next one takes its memory
