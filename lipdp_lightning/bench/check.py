"""Checks ratios of step time, memory and start-up against bounds: a regression fails, a slow machine does not.

The bounds are those of the machine that they were measured on. The same code has taken 3.28 times as long as a step
without privacy on one machine and 3.99 times on another, so that a check on an unknown machine has to leave room, which
:func:`with_room` adds. What a step calls does not depend on the machine: ``tests/test_docs.py`` counts it.

What else a machine does slows a step of many small operations more than one of a few large ones, so that the median
over the rounds moves by as much as the rounds differ. Hence a median exceeds a bound only if the nearer quartile does,
and by more than the distance between the quartiles. It is then measured once more, with twice the rounds, and fails if
it exceeds the bound again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from . import start_up
from .compare import Effort, measure_cell
from .contender_rows import Row, memory_over, quartiles, ratios_of
from .contenders import REFERENCE, Job, problem_of
from .networks import network_named

OWN_BOUNDS = Path(__file__).with_name("bounds.yaml")
IN_STEPS = ("step_time", "peak_memory")
QUANTITIES = (*IN_STEPS, *start_up.IMPORTS)
_ROUNDS = 7
_STARTS = 3


@dataclass(frozen=True)
class Bound:
    """A ratio and its limits; for step_time and peak_memory it is that of ``contender`` to ``over``."""

    name: str
    quantity: str
    at_most: float | None = None
    at_least: float | None = None
    model: str = ""
    batch_size: int = 0
    contender: str = ""
    over: str = REFERENCE

    @property
    def cell(self) -> tuple[str, int]:
        return self.model, self.batch_size

    def kept_by(self, ratio: float) -> bool:
        return (self.at_most is None or ratio <= self.at_most) and (self.at_least is None or ratio >= self.at_least)

    @property
    def text(self) -> str:
        parts = [("at most", self.at_most), ("at least", self.at_least)]
        return ", ".join(f"{word} {value:.3g}" for word, value in parts if value is not None)


@dataclass(frozen=True)
class Verdict:
    """A measured ratio: its median and quartiles, or why there is none."""

    bound: Bound
    ratio: float = math.nan
    spread: tuple[float, float] = (math.nan, math.nan)
    note: str = ""

    @property
    def kept(self) -> bool:
        low, high = self.spread
        room = high - low
        return any(map(self.bound.kept_by, (self.ratio, low - room, high + room)))


def read_bounds(path: Path) -> list[Bound]:
    """Returns the bounds of a file; one error lists every problem."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}. HINT: see {OWN_BOUNDS.name} of the library.") from error
    if not isinstance(content, list) or not content:
        raise ValueError(f"{path} is not a list of bounds. HINT: see {OWN_BOUNDS.name} of the library.")
    problems = [f"bound {number}: {text}" for number, entry in enumerate(content, 1) for text in _problems(entry)]
    if problems:
        raise ValueError("\n".join([f"{path}:", *problems, f"HINT: see {OWN_BOUNDS.name} of the library."]))
    return [Bound(**entry) for entry in content]


def _problems(entry: Any) -> list[str]:
    if not isinstance(entry, dict):
        return [f"{entry!r} has no keys"]
    known = [f.name for f in fields(Bound)]
    problems = [f"unknown key {key!r}, not one of {', '.join(known)}" for key in entry if key not in known]
    problems += [f"no {key}" for key in ("name", "quantity") if key not in entry]
    limits = [entry[key] for key in ("at_most", "at_least") if key in entry]
    if not limits:
        problems.append("neither at_most nor at_least")
    problems += [f"{limit!r} is not a positive number" for limit in limits if not _positive(limit)]
    quantity = entry.get("quantity")
    if quantity not in QUANTITIES:
        problems.append(f"quantity {quantity!r} is not one of {', '.join(QUANTITIES)}")
    return problems + (_problems_of_steps(entry) if quantity in IN_STEPS else [])


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _problems_of_steps(entry: dict[str, Any]) -> list[str]:
    problems = []
    try:
        network_named(str(entry.get("model")))
    except ValueError as error:
        problems.append(str(error).removeprefix("--"))
    if not (isinstance(entry.get("batch_size"), int) and entry["batch_size"] > 0):
        problems.append(f"batch_size {entry.get('batch_size')!r} is not a positive whole number")
    names = [str(entry.get("contender")), str(entry.get("over", REFERENCE))]
    return problems + [problem for name in names if (problem := problem_of(name)) is not None]


def with_room(bounds: Sequence[Bound], room: float) -> list[Bound]:
    """Returns the bounds with the limits of step times loosened by the factor ``room``, for an unknown machine."""
    return [_loosened(bound, room) if bound.quantity == "step_time" else bound for bound in bounds]


def _loosened(bound: Bound, room: float) -> Bound:
    at_most = None if bound.at_most is None else bound.at_most * room
    return replace(bound, at_most=at_most, at_least=None if bound.at_least is None else bound.at_least / room)


def check(
    bounds: Sequence[Bound], *, device: str = "cpu", threads: int = 1, rounds: int = _ROUNDS,
    say: Callable[[str], None] = lambda line: None,
) -> list[Verdict]:  # fmt: skip
    """Returns the verdict for every bound."""
    verdicts = {id(v.bound): v for v in _measured(bounds, device, threads, rounds, _STARTS)}
    again = [v.bound for v in verdicts.values() if not v.kept]
    if again:
        say(f"measured once more: {', '.join(bound.name for bound in again)}")
        verdicts |= {id(v.bound): v for v in _measured(again, device, threads, 2 * rounds, 2 * _STARTS)}
    return [verdicts[id(bound)] for bound in bounds]


def _measured(bounds: Sequence[Bound], device: str, threads: int, rounds: int, starts: int) -> list[Verdict]:
    verdicts = []
    effort = Effort(rounds=rounds, turn_seconds=0.5, few_rounds=rounds, parts=False)
    for cell in dict.fromkeys(bound.cell for bound in bounds if bound.quantity in IN_STEPS):
        own = [bound for bound in bounds if bound.quantity in IN_STEPS and bound.cell == cell]
        names = dict.fromkeys([REFERENCE, *(name for bound in own for name in (bound.over, bound.contender))])
        jobs = [Job(name, *cell, device, threads) for name in names]
        memory_of = {name for bound in own if bound.quantity == "peak_memory" for name in (bound.over, bound.contender)}
        rows = {row.contender: row for row in measure_cell(jobs, effort, memory_of)}
        verdicts += [_verdict(bound, rows[bound.contender], rows[bound.over]) for bound in own]
    for bound in bounds:
        if bound.quantity not in IN_STEPS:
            ratios, seconds = start_up.measure(bound.quantity, starts, threads)
            note = f"{statistics.median(seconds):.2f} s"
            verdicts.append(Verdict(bound, statistics.median(ratios), quartiles(ratios), note))
    return verdicts


def _verdict(bound: Bound, row: Row, over: Row) -> Verdict:
    """Returns the verdict for one bound; a contender without a result keeps no bound."""
    for lost in (row, over):
        if not lost.runs:
            return Verdict(bound, note=f"{lost.contender}: {lost.status}, {lost.reason}")
    if bound.quantity == "peak_memory":
        memory = memory_over(row, over)
        return (
            Verdict(bound, note=row.reason or over.reason or "no memory was measured")
            if memory is None
            else Verdict(bound, memory, (memory,) * 2)
        )
    ratios = ratios_of(row, over)
    return Verdict(bound, statistics.median(ratios), quartiles(ratios), f"{len(ratios)} rounds")


def printed(verdicts: Sequence[Verdict]) -> str:
    """Returns the text for the terminal, which repeats failed bounds with their spread."""
    from ..report.tables import render_table

    lines = [
        (
            v.bound.name, f"{v.ratio:.3g}", f"{v.spread[0]:.3g} to {v.spread[1]:.3g}", v.bound.text,
            "kept" if v.kept else "EXCEEDED", v.note,
        )
        for v in verdicts
    ]  # fmt: skip
    headers = ("ratio", "median", "quartiles", "bound", "", "")
    table = render_table(headers, lines, title="Ratios against their bounds")
    failed = [
        f"{v.bound.name}: {v.ratio:.3g} (quartiles {v.spread[0]:.3g} to {v.spread[1]:.3g}) is not {v.bound.text}"
        for v in verdicts
        if not v.kept
    ]
    return "\n".join([table, *failed]) + "\n"
