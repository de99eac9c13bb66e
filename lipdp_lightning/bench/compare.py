"""Contenders side by side: every one in its own process, all of them in turns, round after round.

A ratio is that of a contender's median step to the reference's in the same round, and what is reported are the
median and the quartiles of these ratios over the rounds: what slows the machine down slows both.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .contenders import OURS, REFERENCE, Job
from .memory import available_bytes
from .parts import REST
from .turns import Worker, WorkerEndedError, environment

SET_UP_LIMIT = 180.0
"""Seconds until a process must be ready for its first step."""

SHARE_OF_MEMORY = 0.85
"""Of what is available, that one contender may take where no limit is given: the machine must not run out."""

OK, OUT_OF_MEMORY, TOO_SLOW, FAILED = "ok", "out of memory", "too slow", "cannot run"


@dataclass(frozen=True)
class Effort:
    """How long is measured: turns of about ``turn_seconds``, at most ``most_steps`` and at least one step.

    A contender of whose steps one takes more than ``patience`` seconds is too slow; one whose step takes more than
    ``long_step`` has no step to warm up in its turns, and at most ``few_rounds`` of them.
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


@dataclass
class Row:
    """A contender's result. Seconds of a step: median and quartiles over all steps; memory in bytes.

    ``peak_memory`` is the peak above the set-up, ``total_memory`` with it. ``round_seconds`` are the medians of the
    rounds, from which ratios are made. ``parts`` are seconds per step by part,
    ``beside`` those of other threads; both from turns of their own, after the comparison.
    """

    model: str
    batch_size: int
    contender: str
    status: str = OK
    reason: str = ""
    parameters: int = 0
    steps: int = 0
    rounds: int = 0
    seconds: float | None = None
    seconds_quartiles: tuple[float, float] | None = None
    ratio: float | None = None
    ratio_quartiles: tuple[float, float] | None = None
    peak_memory: int | None = None
    total_memory: int | None = None
    memory_ratio: float | None = None
    round_seconds: dict[int, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    beside: dict[str, float] = field(default_factory=dict)


@dataclass
class _Entry:
    """A contender of a cell, while it is measured."""

    row: Row
    worker: Worker
    first: float = 0.0
    turns: dict[int, list[float]] = field(default_factory=dict)

    def ask(self, limit: float, **order: Any) -> dict[str, Any] | None:
        return self._answer(lambda: self.worker.ask(limit, **order), limit)

    def ready(self) -> None:
        report = self._answer(lambda: self.worker.answer(SET_UP_LIMIT), SET_UP_LIMIT)
        self.row.parameters = int((report or {}).get("parameters", 0))

    def _answer(self, ask: Callable[[], dict[str, Any]], limit: float) -> dict[str, Any] | None:
        """Its report, or None once it has none to give; the row then says why."""
        try:
            report = ask()
        except WorkerEndedError as error:
            if error.killed_for == "time":
                self._lost(TOO_SLOW, f"no answer within {limit:.0f} s")
            elif error.killed_for == "memory" or error.code == -9:
                self._lost(OUT_OF_MEMORY, "ended at the memory limit" if error.killed_for else "ended by the system")
            else:
                self._lost(FAILED, str(error).splitlines()[-1])
            return None
        if "out_of_memory" in report:
            return self._lost(OUT_OF_MEMORY, report["out_of_memory"])
        return self._lost(FAILED, report["failed"]) if "failed" in report else report

    def _lost(self, status: str, reason: str) -> None:
        self.row.status, self.row.reason = status, " ".join(reason.split())[:300]
        self.worker.close()

    @property
    def runs(self) -> bool:
        return self.row.status == OK


def measure_cell(jobs: Sequence[Job], effort: Effort) -> list[Row]:
    """The contenders of one network and batch size; the reference is the first of them."""
    assert jobs[0].contender == REFERENCE
    entries = [_started(job) for job in jobs]
    try:
        for entry in entries:
            entry.ready()
        _warm_up(entries, effort)
        _rounds(entries, effort)
        for entry in entries:
            if effort.parts and entry.runs and entry.row.contender in OURS:
                _parts(entry, effort)
    finally:
        for entry in entries:
            entry.worker.close()
    for entry in entries:
        _conclude(entry, entries[0])
    return [entry.row for entry in entries]


def _started(job: Job) -> _Entry:
    limit = job.memory_limit
    if limit is None and job.device == "cpu":
        available = available_bytes()
        limit = None if available is None else int(SHARE_OF_MEMORY * available)
    command = [sys.executable, "-m", "lipdp_lightning.bench.worker", json.dumps(asdict(job))]
    worker = Worker(command, [environment(job.threads)], limit if job.device == "cpu" else None)
    return _Entry(Row(job.model, job.batch_size, job.contender), worker)


def _warm_up(entries: list[_Entry], effort: Effort) -> None:
    """Two steps that are not counted, or a long one; the last one says how many make a turn."""
    for entry in entries:
        for _ in range(2):
            if entry.runs and entry.first <= effort.long_step:
                report = entry.ask(effort.patience, steps=1, warm_up=0)
                entry.first = report["seconds"][0] if report is not None else entry.first


def _rounds(entries: list[_Entry], effort: Effort) -> None:
    """Every round begins with another contender, so that none always follows the same one."""
    for turn in range(effort.rounds):
        shift = turn % len(entries)
        for entry in [*entries[shift:], *entries[:shift]]:
            long = entry.first > effort.long_step
            if not entry.runs or (long and turn >= effort.few_rounds):
                continue
            steps = effort.steps(entry.first)
            limit = effort.patience * (steps + 1)
            report = entry.ask(limit, steps=steps, warm_up=0 if long else 1)
            if report is not None:
                entry.turns[turn] = report["seconds"]
                entry.row.peak_memory = report["peak"] - report["base"]
                entry.row.total_memory = report["peak"]


def _parts(entry: _Entry, effort: Effort) -> None:
    steps = effort.steps(entry.first)
    report = entry.ask(effort.patience * (steps + 1), steps=steps, warm_up=0, parts=True)
    if report is None:  # the comparison holds without it
        entry.row.status, entry.row.reason = OK, f"no parts: {entry.row.reason}"
        return
    parts = {name: seconds / steps for name, seconds in report["parts"].items()}
    rest = statistics.fmean(report["seconds"]) - sum(parts.values())
    entry.row.parts = parts | {REST: rest}
    entry.row.beside = {name: seconds / steps for name, seconds in report["beside"].items()}


def _conclude(entry: _Entry, reference: _Entry) -> None:
    row, times = entry.row, [seconds for turn in entry.turns.values() for seconds in turn]
    row.steps, row.rounds = len(times), len(entry.turns)
    if not times or not entry.runs:
        return
    row.seconds, row.seconds_quartiles = statistics.median(times), quartiles(times)
    row.round_seconds = {turn: statistics.median(seconds) for turn, seconds in entry.turns.items()}
    ratios = ratios_of(row, reference.row)
    if ratios:
        row.ratio, row.ratio_quartiles = statistics.median(ratios), quartiles(ratios)
        row.memory_ratio = memory_over(row, reference.row)


def ratios_of(row: Row, other: Row) -> list[float]:
    """The step times of one contender over those of another in the same cell, round by round."""
    if row.status != OK or other.status != OK:
        return []
    return [
        row.round_seconds[turn] / other.round_seconds[turn] for turn in row.round_seconds if turn in other.round_seconds
    ]


def memory_over(row: Row, other: Row) -> float | None:
    """The peak memory of one contender over that of another, both above their set-up."""
    return row.peak_memory / other.peak_memory if row.peak_memory is not None and other.peak_memory else None


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The quartiles, by linear interpolation between the values."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


@dataclass(frozen=True)
class Cell:
    model: str
    batch_size: int
    contenders: tuple[str, ...]


def compare(
    cells: Sequence[Cell], effort: Effort, *, device: str = "cpu", threads: int = 1, memory_limit: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Row]:  # fmt: skip
    """The rows of all cells, one cell after the other; ``say`` hears of the progress."""
    for number, cell in enumerate(cells, 1):
        start = time.monotonic()
        names = [REFERENCE, *(name for name in cell.contenders if name != REFERENCE)]
        jobs = [Job(name, cell.model, cell.batch_size, device, threads, memory_limit) for name in names]
        rows = measure_cell(jobs, effort)
        say(f"{number}/{len(cells)}: {cell.model} at batch {cell.batch_size}, {time.monotonic() - start:.0f} s")
        yield from rows


def machine(device: str, threads: int, memory_limit: int | None) -> dict[str, Any]:
    """What the numbers were measured on."""
    import platform

    import torch

    facts: dict[str, Any] = {
        "command": shlex.join(["lipdp", *sys.argv[1:]]), "device": device, "threads": threads,
        "processors": os.cpu_count(), "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__, "python": platform.python_version(), "system": platform.platform(),
        "memory_limit": memory_limit, "memory_available": available_bytes(),
    }  # fmt: skip
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts
