"""Squares of examples, read once and added in float64: compiled loops over contiguous float32 rows on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compiled import loop


@loop("void(float32[:, ::1], float64[::1])", any_order=True)
def row_energies(rows: Any, out: Any) -> None:
    """out[i] <- ||rows[i]||^2."""
    for index in range(len(rows)):
        row, energy = rows[index], 0.0
        for place in range(len(row)):
            value = np.float64(row[place])
            energy += value * value
        out[index] = energy


@loop("void(float32[:, :, ::1], float64[::1], int64, float64[::1])", any_order=True)
def patch_energies(images: Any, counts: Any, groups: int, out: Any) -> None:
    """out[i] <- the largest, over groups of channels, of the sums of counts[p] images[i, c, p]^2 over their c and all p."""
    width = images.shape[1] // groups
    for index in range(len(images)):
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
