"""Rows scaled by factors of their own, in as few passes as possible: compiled loops over float32 rows on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compiled import loop
from ..team import carray, pointer_at, share, thread_count, thread_number


@loop("void(int64, int64, float32[:, ::1], float64[::1], float32[:, ::1])", any_order=True)
def bound_rows(part: int, parts: int, rows: Any, limits: Any, out: Any) -> None:
    """out[i] <- the finite values of row i, times limits[0] / max(their norm, limits[1]).

    NaN is taken for 0, and what lies beyond limits[2] for that.
    """
    first, last = share(len(rows), part, parts)
    radius, floor, largest = limits[0], limits[1], np.float32(limits[2])
    for index in range(first, last):
        row, finite, energy = rows[index], out[index], 0.0
        for place in range(len(row)):
            value = row[place]
            if value != value:
                value = np.float32(0.0)
            value = min(max(value, -largest), largest)
            finite[place] = value
            energy += np.float64(value) * np.float64(value)
        factor = np.float32(radius / max(np.sqrt(energy), floor))
        for place in range(len(row)):
            finite[place] *= factor


_bound_rows = bound_rows.compiled


@bound_rows.body
def _(data: Any) -> None:
    field = carray(data, (8,), np.int64)
    rows = carray(pointer_at(field[0]), (field[1], field[2]), np.float32)
    limits = carray(pointer_at(field[3]), (field[4],), np.float64)
    out = carray(pointer_at(field[5]), (field[6], field[7]), np.float32)
    _bound_rows(thread_number(), thread_count(), rows, limits, out)


@loop("void(int64, int64, float32[:, ::1], float32[::1], float32[:, ::1])", any_order=True)
def weigh_rows(part: int, parts: int, rows: Any, factors: Any, out: Any) -> None:
    """out[i] <- factors[i] rows[i]; zero where factors[i] ||rows[i]||^2 is not a finite float32."""
    first, last = share(len(rows), part, parts)
    for index in range(first, last):
        row, weighed, factor, energy = rows[index], out[index], factors[index], 0.0
        for place in range(len(row)):
            value = np.float64(row[place])
            energy += value * value
        if abs(np.float32(energy) * factor) < np.inf:
            for place in range(len(row)):
                weighed[place] = row[place] * factor
        else:
            for place in range(len(row)):
                weighed[place] = np.float32(0.0)


_weigh_rows = weigh_rows.compiled


@weigh_rows.body
def _(data: Any) -> None:
    field = carray(data, (8,), np.int64)
    rows = carray(pointer_at(field[0]), (field[1], field[2]), np.float32)
    factors = carray(pointer_at(field[3]), (field[4],), np.float32)
    out = carray(pointer_at(field[5]), (field[6], field[7]), np.float32)
    _weigh_rows(thread_number(), thread_count(), rows, factors, out)
