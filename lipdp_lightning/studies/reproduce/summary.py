"""Computes means over repetitions, for tables and figures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lipdp_lightning.studies.reproduce.entry import Row, Rows, Value, text_of


def number(value: Value) -> float:
    """Returns a cell of a row as a float; nan for an empty one."""
    assert not isinstance(value, str), f"{value!r} is not a number"
    return math.nan if value is None else float(value)


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and the sample's standard deviation, 0 for a single value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def summarize(rows: Rows, by: Sequence[str], values: Sequence[str]) -> list[Row]:
    """Returns one row per combination of the columns `by`, in order of appearance: its runs, means, and deviations.

    `by` must hold the columns of privacy if the result is to be a page's table, since rows of different epsilons are
    never averaged.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(text_of(row.get(name)) for name in by), []).append(row)
    found: list[Row] = []
    for group in groups.values():
        summary: dict[str, Value] = {name: group[0].get(name) for name in by}
        summary["runs"] = len(group)
        for name in values:
            mean, deviation = mean_and_deviation([number(row.get(name)) for row in group])
            summary[name] = mean
            if len(group) > 1:
                summary[f"{name} (sd)"] = deviation
        found.append(summary)
    return found
