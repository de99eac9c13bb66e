"""Squares of examples, read once and added in float64: compiled loops over contiguous float32 rows on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compiled import loop
from ..team import carray, pointer_at, share, thread_count, thread_number


@loop("void(int64, int64, float32[:, ::1], float64[::1])", any_order=True)
def row_energies(part: int, parts: int, rows: Any, out: Any) -> None:
    """out[i] <- ||rows[i]||^2."""
    first, last = share(len(rows), part, parts)
    for index in range(first, last):
        row, energy = rows[index], 0.0
        for place in range(len(row)):
            value = np.float64(row[place])
            energy += value * value
        out[index] = energy


_row_energies = row_energies.compiled


@row_energies.body
def _(data: Any) -> None:
    field = carray(data, (5,), np.int64)
    rows = carray(pointer_at(field[0]), (field[1], field[2]), np.float32)
    out = carray(pointer_at(field[3]), (field[4],), np.float64)
    _row_energies(thread_number(), thread_count(), rows, out)


@loop("void(int64, int64, float32[:, :, ::1], float64[::1], int64, float64[::1])", any_order=True)
def patch_energies(part: int, parts: int, images: Any, counts: Any, groups: int, out: Any) -> None:
    """out[i] <- the largest, over groups of channels, of sums of counts[p] images[i, c, p]^2 over their c and all p."""
    first, last = share(len(images), part, parts)
    width = images.shape[1] // groups
    for index in range(first, last):
        largest = 0.0
        for group in range(groups):
            energy = 0.0
            for channel in range(group * width, (group + 1) * width):
                image = images[index, channel]
                for pixel in range(len(image)):
                    value = np.float64(image[pixel])
                    energy += value * value * counts[pixel]
            if not energy <= largest:  # so written that NaN remains
                largest = energy
        out[index] = largest


_patch_energies = patch_energies.compiled


@patch_energies.body
def _(data: Any) -> None:
    field = carray(data, (9,), np.int64)
    images = carray(pointer_at(field[0]), (field[1], field[2], field[3]), np.float32)
    counts = carray(pointer_at(field[4]), (field[5],), np.float64)
    out = carray(pointer_at(field[7]), (field[8],), np.float64)
    _patch_energies(thread_number(), thread_count(), images, counts, field[6], out)
