"""Defines the public grid of a curve: 2^L cells of a declared range.

The ends are declared, or found by a mechanism that is in the ledger. Ends taken from the data (thesis 6.3.1 takes the
smallest and largest value) publish two records exactly, and no noise on the counts repairs that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lipdp_lightning.curves.discrete_noise import FloatArray, IntArray

MOST_LEVELS = 22
LARGEST_END = 1e300


@dataclass(frozen=True)
class Grid:
    """Points tau_1 < .. < tau_N = high; cell i holds the values in (tau_{i-1}, tau_i], the first also `low`.

    The count of the cells up to i is then exactly N F(tau_i), without discretisation error at the points.
    """

    low: float
    high: float
    levels: int

    def __post_init__(self) -> None:
        problems = []
        # the ends are multiplied by numbers up to the largest grid's size
        if not (-LARGEST_END <= self.low < self.high <= LARGEST_END):
            problems.append(f"the range [{self.low}, {self.high}] is not a finite interval.")
        if not 1 <= self.levels <= MOST_LEVELS or int(self.levels) != self.levels:
            problems.append(f"levels {self.levels} is not a whole number from 1 to {MOST_LEVELS}.")
        if not problems and not bool(np.all(np.diff(self.edges) > 0)):
            problems.append(f"the range [{self.low}, {self.high}] is too narrow for 2^{self.levels} cells.")
        if problems:
            raise ValueError(" ".join(problems) + " HINT: use, for example, a range 0,1 and 10 levels.")

    @property
    def size(self) -> int:
        return 1 << int(self.levels)

    @property
    def edges(self) -> FloatArray:
        """The ends of the cells: tau_0 = low, .., tau_N = high."""
        edges = self.low + (self.high - self.low) * np.arange(self.size + 1) / self.size
        edges[-1] = self.high
        return edges

    @property
    def points(self) -> FloatArray:
        return self.edges[1:]

    def cells(self, values: npt.ArrayLike, clamp: bool = False) -> IntArray:
        """Returns the index of each value's cell; values outside the range are refused, or moved to its ends (`clamp`).

        The error is shown to the holder of the data. Its text contains neither the values nor their number, so a log
        that holds it reveals no more than that there is one.
        """
        data = np.asarray(values, dtype=np.float64).reshape(-1)
        if not bool(np.all(np.isfinite(data))):
            raise ValueError("a value is not a finite number. HINT: remove or replace missing values first.")
        if clamp:
            data = np.clip(data, self.low, self.high)
        elif data.size and (float(data.min()) < self.low or float(data.max()) > self.high):
            raise ValueError(
                f"values lie outside the declared range [{self.low:g}, {self.high:g}]. "
                "HINT: declare a range that is known to hold every possible value, not one read off the data."
            )
        return np.searchsorted(self.points, data, side="left").astype(np.int64)

    def histogram(self, values: npt.ArrayLike, clamp: bool = False) -> IntArray:
        return np.bincount(self.cells(values, clamp), minlength=self.size).astype(np.int64)
