"""Compares contenders side by side: each in its own process, all of them in turns, round after round.

A ratio is that of a contender's median step to the reference's in the same round. The median and the quartiles of these
ratios over the rounds are reported, since whatever slows the machine down slows both.
"""

from __future__ import annotations

import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .contender_process import Entry, started
from .contender_rows import Row, memory_over, quartiles, ratios_of
from .contenders import OURS, REFERENCE, Job
from .needed import measure_memory
from .networks import network_named
from .peak_memory import available_bytes
from .step_parts import REST


@dataclass(frozen=True)
class Effort:
    """Limits of a measurement: turns of about ``turn_seconds``, at most ``most_steps`` and at least one step.

    A contender whose step takes more than ``patience`` seconds is too slow; one whose step takes more than
    ``long_step`` has no warm-up step in its turns, and at most ``few_rounds`` of them.
    """

    rounds: int = 5
    turn_seconds: float = 0.6
    most_steps: int = 12
    long_step: float = 2.0
    few_rounds: int = 2
    patience: float = 60.0
    parts: bool = True

    def steps(self, seconds: float) -> int:
        return max(1, min(self.most_steps, round(self.turn_seconds / max(seconds, 1e-6))))


def measure_cell(jobs: Sequence[Job], effort: Effort, memory_of: Collection[str] = ()) -> list[Row]:
    """Measures the contenders of one network and batch size.

    Args:
        jobs: the contenders; the first one is the reference.
        effort: how long to measure.
        memory_of: names of contenders that are started once more when the times are known, to measure their memory.

    Returns:
        One row for each contender.
    """
    assert jobs[0].contender == REFERENCE
    entries = [started(job) for job in jobs]
    try:
        for entry in entries:
            entry.ready()
        _warm_up(entries, effort)
        _rounds(entries, effort)
    finally:
        for entry in entries:
            entry.worker.close()
    for job, entry in zip(jobs, entries, strict=True):
        if effort.parts and entry.row.runs and entry.row.contender in OURS:
            _measure_parts(job, entry, effort)
    for entry in entries:
        _conclude(entry, entries[0])
    asked = [(job, entry.row) for job, entry in zip(jobs, entries, strict=True) if job.contender in memory_of]
    if asked:
        measure_memory([job for job, _ in asked], [row for _, row in asked], effort.patience)
    for entry in entries:
        entry.row.memory_ratio = memory_over(entry.row, entries[0].row)
    return [entry.row for entry in entries]


def _warm_up(entries: list[Entry], effort: Effort) -> None:
    """Takes two steps that are not counted, or a long one; the last one tells how many make a turn."""
    for entry in entries:
        for _ in range(2):
            if entry.row.runs and entry.first <= effort.long_step:
                report = entry.ask(effort.patience, steps=1, warm_up=0)
                entry.first = report["seconds"][0] if report is not None else entry.first


def _rounds(entries: list[Entry], effort: Effort) -> None:
    """Begins every round with another contender, so that none always follows the same one."""
    for turn in range(effort.rounds):
        shift = turn % len(entries)
        for entry in [*entries[shift:], *entries[:shift]]:
            long = entry.first > effort.long_step
            if not entry.row.runs or (long and turn >= effort.few_rounds):
                continue
            steps = effort.steps(entry.first)
            limit = effort.patience * (steps + 1)
            report = entry.ask(limit, steps=steps, warm_up=0 if long else 1)
            if report is not None:
                entry.turns[turn] = report["seconds"]
                entry.row.resident_memory = report["peak"]


def _measure_parts(job: Job, measured: Entry, effort: Effort) -> None:
    """Measures the parts of a contender's step in another process; the comparison is valid without them."""
    steps = effort.steps(measured.first)
    timed = started(replace(job, parts=True))
    try:
        timed.ready()
        warm = timed.ask(2 * effort.patience, steps=2, warm_up=0) if timed.row.runs else None
        report = warm and timed.ask(effort.patience * (steps + 1), steps=steps, warm_up=0)
    finally:
        timed.worker.close()
    if report is None:
        measured.row.reason = f"no parts: {timed.row.reason}"
        return
    parts = {name: seconds / steps for name, seconds in report["parts"].items()}
    measured.row.parts = parts | {REST: statistics.fmean(report["seconds"]) - sum(parts.values())}
    measured.row.beside = {name: seconds / steps for name, seconds in report["beside"].items()}


def _conclude(entry: Entry, reference: Entry) -> None:
    row, times = entry.row, [seconds for turn in entry.turns.values() for seconds in turn]
    row.steps, row.rounds = len(times), len(entry.turns)
    if not times or not entry.row.runs:
        return
    row.seconds, row.seconds_quartiles = statistics.median(times), quartiles(times)
    row.epoch_seconds = row.seconds * network_named(row.model).rows / row.batch_size
    row.round_seconds = {turn: statistics.median(seconds) for turn, seconds in entry.turns.items()}
    ratios = ratios_of(row, reference.row)
    if ratios:
        row.ratio, row.ratio_quartiles = statistics.median(ratios), quartiles(ratios)
        row.resident_ratio = memory_over(row, reference.row, "resident_memory")


@dataclass(frozen=True)
class Cell:
    """One comparison; ``memory`` tells whether to compare the memory that the contenders need as well."""

    model: str
    batch_size: int
    contenders: tuple[str, ...]
    threads: int = 1
    memory: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The contenders, the reference first."""
        return REFERENCE, *(name for name in self.contenders if name != REFERENCE)


def plan_of(cells: Sequence[Cell]) -> str:
    """Returns a description of what will be done, for the waiting user."""
    timed = sum(len(cell.names) for cell in cells)
    memory = sum(len(cell.names) for cell in cells if cell.memory)
    lines = [f"{len(cells)} comparisons: {timed} processes whose steps are timed, {memory} whose memory is measured"]
    for model, threads in dict.fromkeys((cell.model, cell.threads) for cell in cells):
        own = [cell for cell in cells if (cell.model, cell.threads) == (model, threads)]
        sizes = ", ".join(str(cell.batch_size) for cell in own)
        lines.append(f"  {model}, threads: {threads}, batch {sizes}; {len(own[0].names)} contenders")
    return "\n".join(lines)


def compare(
    cells: Sequence[Cell], effort: Effort, *, device: str = "cpu", memory_limit: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Row]:  # fmt: skip
    """Yields the rows of all cells, one cell after the other; ``say`` is told of the progress."""
    begin = time.monotonic()
    for number, cell in enumerate(cells, 1):
        start = time.monotonic()
        jobs = [Job(name, cell.model, cell.batch_size, device, cell.threads, memory_limit) for name in cell.names]
        rows = measure_cell(jobs, effort, cell.names if cell.memory else ())
        taken, so_far = time.monotonic() - start, time.monotonic() - begin
        say(
            f"{number}/{len(cells)}: {cell.model} at batch {cell.batch_size}, threads: {cell.threads}, {taken:.0f} s; "
            f"{so_far / 60:.1f} minutes so far"
        )
        yield from rows


def machine(device: str, threads: Collection[int], memory_limit: int | None) -> dict[str, Any]:
    """Returns a description of the machine that the numbers were measured on."""
    import platform

    import torch

    facts: dict[str, Any] = {
        "command": shlex.join(["lipdp", *sys.argv[1:]]), "device": device, "threads": sorted(threads),
        "processors": os.cpu_count(), "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__, "python": platform.python_version(), "system": platform.platform(),
        "memory_limit": memory_limit, "memory_available": available_bytes(),
    }  # fmt: skip
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts
