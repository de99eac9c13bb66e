"""Norms of examples, read once and added in float64: compiled loops over contiguous float32 rows on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compiled import loop
from ..team import carray, pointer_at, share, thread_count, thread_number


@loop("void(int64, int64, float32[:, ::1], int64, float32[::1])", any_order=True)
def row_norms(part: int, parts: int, rows: Any, more: int, out: Any) -> None:
    """out[i] <- sqrt(||rows[i]||^2 + more)."""
    first, last = share(len(rows), part, parts)
    for index in range(first, last):
        row, energy = rows[index], 0.0
        for place in range(len(row)):
            value = np.float64(row[place])
            energy += value * value
        out[index] = np.float32(np.sqrt(energy + more))


_row_norms = row_norms.compiled


@row_norms.body
def _(data: Any) -> None:
    field = carray(data, (6,), np.int64)
    rows = carray(pointer_at(field[0]), (field[1], field[2]), np.float32)
    out = carray(pointer_at(field[4]), (field[5],), np.float32)
    _row_norms(thread_number(), thread_count(), rows, field[3], out)


@loop("void(int64, int64, float32[:, :, ::1], float64[::1], int64, int64, float32[::1])", any_order=True)
def patch_norms(part: int, parts: int, images: Any, counts: Any, groups: int, more: int, out: Any) -> None:
    """out[i] <- the root of more, and the largest group of channels' sum of counts[p] images[i, c, p]^2."""
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
        out[index] = np.float32(np.sqrt(largest + more))


_patch_norms = patch_norms.compiled


@patch_norms.body
def _(data: Any) -> None:
    field = carray(data, (10,), np.int64)
    images = carray(pointer_at(field[0]), (field[1], field[2], field[3]), np.float32)
    counts = carray(pointer_at(field[4]), (field[5],), np.float64)
    out = carray(pointer_at(field[8]), (field[9],), np.float32)
    _patch_norms(thread_number(), thread_count(), images, counts, field[6], field[7], out)
