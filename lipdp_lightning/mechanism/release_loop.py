"""The noise of a release, compiled: words to normals, and at once to what the gradients become.

Normals are made a block at a time, which stays in the nearest cache until the entries that it belongs to are complete.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from ..compiled import loop
from ..privacy.box_muller import pairs
from ..team import carray, pointer_at, share, thread_count, thread_number

FIRST, LAST, PLACE, IS_DOUBLE, APART = range(5)
"""Columns of a table of segments, int64: [first, last) of the flat vector, the address of the entry ``first``, whether
it is of float64 and not of float32, and the address of the float64 that is added to it beforehand, or 0."""

DEVIATION, SHARE, FACTOR, SHIFT = range(4)
"""Columns of the table of their numbers, float64; the last one rounds to a grid (privacy/grid.py)."""


def complete(noise: Any, deviation: float, values: Any, share_of_values: float, factor: float, shift: float) -> None:
    for index in range(len(noise)):
        total = deviation * noise[index] + share_of_values * values[index]
        values[index] = ((total + shift) - shift) * factor


def complete_beside(
    noise: Any, deviation: float, apart: Any, values: Any, share_of_values: float, factor: float, shift: float
) -> None:
    for index in range(len(noise)):
        sum_apart = deviation * noise[index] + share_of_values * apart[index]
        total = sum_apart + share_of_values * values[index]
        values[index] = ((total + shift) - shift) * factor


def sum_of_draws(draws: Any) -> None:
    """Several independent draws to one, in the place of the first."""
    factor = 1.0 / math.sqrt(len(draws))
    for index in range(draws.shape[1]):
        total = 0.0
        for sample in range(len(draws)):
            total += draws[sample, index]
        draws[0, index] = total * factor


# functions of their own, with indices that cannot be negative: only so are they made of vector instructions
_complete = numba.njit(error_model="numpy")(complete)
_complete_beside = numba.njit(error_model="numpy")(complete_beside)
_sum_of_draws = numba.njit(error_model="numpy")(sum_of_draws)


@numba.njit(error_model="numpy")
def _complete_segments(noise: Any, position: int, segments: Any, numbers: Any) -> None:
    """What segments have of ``noise``, which begins at this position of the flat vector."""
    end = position + len(noise)
    low, high = 0, len(segments)
    while low < high:  # the first segment that ends behind the position
        middle = (low + high) // 2
        if segments[middle, LAST] <= position:
            low = middle + 1
        else:
            high = middle
    for index in range(low, len(segments)):
        if segments[index, FIRST] >= end:
            break
        first, last = max(position, segments[index, FIRST]), min(end, segments[index, LAST])
        own, skipped, length = noise[first - position : last - position], first - segments[index, FIRST], last - first
        deviation, of_values, factor = numbers[index, DEVIATION], numbers[index, SHARE], numbers[index, FACTOR]
        shift = numbers[index, SHIFT]
        place, place_apart = segments[index, PLACE], segments[index, APART]
        if place_apart == 0 and segments[index, IS_DOUBLE] == 0:
            values = carray(pointer_at(place + 4 * skipped), (length,), np.float32)
            _complete(own, deviation, values, of_values, factor, shift)
        elif place_apart == 0:
            wide = carray(pointer_at(place + 8 * skipped), (length,), np.float64)
            _complete(own, deviation, wide, of_values, factor, shift)
        else:
            apart = carray(pointer_at(place_apart + 8 * skipped), (length,), np.float64)
            if segments[index, IS_DOUBLE] == 0:
                values = carray(pointer_at(place + 4 * skipped), (length,), np.float32)
                _complete_beside(own, deviation, apart, values, of_values, factor, shift)
            else:
                wide = carray(pointer_at(place + 8 * skipped), (length,), np.float64)
                _complete_beside(own, deviation, apart, wide, of_values, factor, shift)


@loop("void(int64, int64, int64[:, :, ::1], int64, int64[:, ::1], float64[:, ::1], float64[:, :, ::1])")
def release(part: int, parts: int, words: Any, start: int, segments: Any, numbers: Any, draws: Any) -> None:
    """entry <- grid(deviation * noise + share * apart + share * entry) * factor, of every entry of ascending segments
    that lies where the words do.

    Args:
        words: of each sample that the noise is the sum of, the same rows.
        start: position of the first row in the flat vector.
        draws: memory for each part, of the normals of every sample that it makes at once.
    """
    half, pairs_at_once = words.shape[2] // 2, draws.shape[2] // 2
    blocks = (half + pairs_at_once - 1) // pairs_at_once
    begin, end = share(words.shape[1] * blocks, part, parts)
    for block in range(begin, end):
        row = block // blocks
        first = (block - row * blocks) * pairs_at_once
        last = min(first + pairs_at_once, half)
        count = last - first
        own = draws[part]
        for sample in range(len(words)):
            of_row, out = words[sample, row], own[sample]
            pairs(
                of_row[first:last],
                of_row[half + first : half + last],
                out[:count],
                out[pairs_at_once : pairs_at_once + count],
            )
        if len(words) > 1:
            _sum_of_draws(own)
        position = start + row * 2 * half + first
        _complete_segments(own[0, :count], position, segments, numbers)
        _complete_segments(own[0, pairs_at_once : pairs_at_once + count], position + half, segments, numbers)


_release = release.compiled


@release.body
def _(data: Any) -> None:
    field = carray(data, (15,), np.int64)
    words = carray(pointer_at(field[0]), (field[1], field[2], field[3]), np.int64)
    segments = carray(pointer_at(field[5]), (field[6], field[7]), np.int64)
    numbers = carray(pointer_at(field[8]), (field[9], field[10]), np.float64)
    draws = carray(pointer_at(field[11]), (field[12], field[13], field[14]), np.float64)
    _release(thread_number(), thread_count(), words, field[4], segments, numbers, draws)
