"""Rows normalised with a floored divisor, and their gradients: compiled loops over float32 on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compiled import loop
from ..team import carray, pointer_at, share, thread_count, thread_number

MEAN, INVERSE, MOVES = range(3)
"""Columns of what is kept of a row, float64: its mean, 1 / divisor, and whether the divisor is its deviation."""


@loop("void(int64, int64, float32[:, ::1], float64, float32[:, ::1], float64[:, ::1])", any_order=True)
def normalize(part: int, parts: int, rows: Any, floor: float, out: Any, kept: Any) -> None:
    """out[i] <- (rows[i] - its mean) / max(floor, its standard deviation)."""
    first, last = share(len(rows), part, parts)
    for index in range(first, last):
        row, own, total, energy = rows[index], out[index], 0.0, 0.0
        for place in range(len(row)):
            total += np.float64(row[place])
        mean = total / len(row)
        for place in range(len(row)):
            value = np.float64(row[place]) - mean
            energy += value * value
        deviation = np.sqrt(energy / len(row))
        moves = 0.0 if deviation < floor else 1.0  # so written that NaN remains
        inverse = 1.0 / (deviation if moves == 1.0 else floor)
        for place in range(len(row)):
            own[place] = np.float32((np.float64(row[place]) - mean) * inverse)
        kept[index, MEAN], kept[index, INVERSE], kept[index, MOVES] = mean, inverse, moves


_normalize = normalize.compiled


@normalize.body
def _(data: Any) -> None:
    field, number = carray(data, (10,), np.int64), carray(data, (10,), np.float64)
    rows = carray(pointer_at(field[0]), (field[1], field[2]), np.float32)
    out = carray(pointer_at(field[4]), (field[5], field[6]), np.float32)
    kept = carray(pointer_at(field[7]), (field[8], field[9]), np.float64)
    _normalize(thread_number(), thread_count(), rows, number[3], out, kept)


@loop("void(int64, int64, float32[:, ::1], float64[:, ::1], float32[:, ::1], float32[:, ::1])", any_order=True)
def pull_back(part: int, parts: int, rows: Any, kept: Any, gradient: Any, out: Any) -> None:
    """out[i] <- (g - mean(g) - u mean(u g)) / divisor of row g of the gradient, u the row's output; without the last
    term where the divisor is the floor.
    """
    first, last = share(len(rows), part, parts)
    for index in range(first, last):
        row, g, own, total, product = rows[index], gradient[index], out[index], 0.0, 0.0
        mean, inverse = kept[index, MEAN], kept[index, INVERSE]
        for place in range(len(row)):
            total += np.float64(g[place])
            product += np.float64(g[place]) * (np.float64(row[place]) - mean)
        constant, slope = total / len(row), 0.0
        if kept[index, MOVES] != 0.0:
            slope = product * inverse * inverse / len(row)
        for place in range(len(row)):
            left = np.float64(g[place]) - constant - (np.float64(row[place]) - mean) * slope
            own[place] = np.float32(left * inverse)


_pull_back = pull_back.compiled


@pull_back.body
def _(data: Any) -> None:
    field = carray(data, (12,), np.int64)
    rows = carray(pointer_at(field[0]), (field[1], field[2]), np.float32)
    kept = carray(pointer_at(field[3]), (field[4], field[5]), np.float64)
    gradient = carray(pointer_at(field[6]), (field[7], field[8]), np.float32)
    out = carray(pointer_at(field[9]), (field[10], field[11]), np.float32)
    _pull_back(thread_number(), thread_count(), rows, kept, gradient, out)
