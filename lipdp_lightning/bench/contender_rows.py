"""Holds the results of a contender on one network at one batch size, and makes ratios of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

OK, OUT_OF_MEMORY, TOO_SLOW, FAILED = "ok", "out of memory", "too slow", "cannot run"


@dataclass
class Row:
    """The result of a contender. Seconds of a step are median and quartiles over all steps; memory is in bytes.

    ``epoch_seconds`` is the median step times the expected number of steps in which all rows are passed once.
    ``peak_memory`` is that of a process that returns what it frees, without libraries and the training rows;
    ``set_up_memory`` is the part of it before the first step, and ``resident_memory`` the peak of the process whose
    steps are timed. ``round_seconds`` are the medians of the rounds, from which ratios are made. ``parts`` are seconds
    per step by part, ``beside`` those of other threads; both come from turns of their own, after the comparison.
    """

    model: str
    batch_size: int
    contender: str
    status: str = OK
    reason: str = ""
    threads: int = 1
    parameters: int = 0
    steps: int = 0
    rounds: int = 0
    seconds: float | None = None
    seconds_quartiles: tuple[float, float] | None = None
    epoch_seconds: float | None = None
    ratio: float | None = None
    ratio_quartiles: tuple[float, float] | None = None
    peak_memory: int | None = None
    set_up_memory: int | None = None
    memory_ratio: float | None = None
    resident_memory: int | None = None
    resident_ratio: float | None = None
    round_seconds: dict[int, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    beside: dict[str, float] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        return self.status == OK


def ratios_of(row: Row, other: Row) -> list[float]:
    """Returns the step times of one contender over those of another in the same cell, round by round."""
    if row.status != OK or other.status != OK:
        return []
    return [
        row.round_seconds[turn] / other.round_seconds[turn] for turn in row.round_seconds if turn in other.round_seconds
    ]


def memory_over(row: Row, other: Row, quantity: str = "peak_memory") -> float | None:
    """Returns the memory of one contender over that of another: peak_memory or resident_memory."""
    own, others = getattr(row, quantity), getattr(other, quantity)
    return own / others if own is not None and others else None


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Returns the quartiles, by linear interpolation between the values."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Groups rows by network and number of threads; names include the latter if there are several."""
    threads: dict[str, set[int]] = {}
    for row in rows:
        threads.setdefault(row.model, set()).add(row.threads)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        name = row.model if len(threads[row.model]) == 1 else f"{row.model}-threads-{row.threads}"
        groups.setdefault(name, []).append(row)
    return groups
