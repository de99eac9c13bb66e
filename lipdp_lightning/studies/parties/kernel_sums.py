"""Defines what is summed over the parties: U-statistics of order one with vector-valued kernels (004, definition
6.2.1).

Every party holds one record. The number of parties is public (every server sees who connects), so the neighbouring
relation is replace-one. Statistics of higher order would need products of different parties' secrets, which shares of
sums do not give; curves such as the ROC, and the area under it, are functions of the order-one counts here.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lipdp_lightning.curves.tree import interval_cost, suffix_cost
from lipdp_lightning.studies.parties.server_noise import NamedNoise

IntArray = npt.NDArray[np.int64]

LARGEST_LEVELS = 32
_LARGEST_ENTRY = 1 << 31


class UStatistic(ABC):
    """A sum over the parties of an integer vector phi(record), and the noise that makes its release private."""

    @property
    @abstractmethod
    def fields(self) -> int:
        """The number of integers in one record."""

    @property
    @abstractmethod
    def length(self) -> int:
        """The number of entries of the sum."""

    @property
    @abstractmethod
    def cost(self) -> int:
        """The least c such that, whichever record is replaced, shifting the noise by ||x||_1 <= c undoes it."""

    @abstractmethod
    def problems(self, records: IntArray) -> list[str]:
        """Returns the reasons why these records (rows) cannot be summed; each party runs this on its own row."""

    @abstractmethod
    def contributions(self, records: IntArray) -> IntArray:
        """Returns phi of every row, as (rows, length)."""

    @abstractmethod
    def noise(self, source: NamedNoise) -> IntArray:
        """Returns one server's noise, of scale cost / epsilon, in the coordinates of the sum."""

    def check(self, records: npt.ArrayLike) -> IntArray:
        """Returns the records as an integer array (rows, fields), or raises a ValueError that lists
        everything wrong.
        """
        given = np.asarray(records)
        array = given.reshape(-1, 1) if given.ndim == 1 and self.fields == 1 else given
        if array.ndim != 2 or array.shape[1] != self.fields or array.shape[0] == 0 or array.dtype.kind not in "iu":
            raise ValueError(
                f"records of shape {given.shape} and type {given.dtype} were given; one row of {self.fields} integers "
                "per party is needed, and at least one party.\nHINT: map values to the declared grid first."
            )
        problems = self.problems(array.astype(np.int64))
        if problems:
            raise ValueError("\n".join([*problems, "HINT: clip values to the declared range before they are shared."]))
        return array.astype(np.int64)


@dataclass(frozen=True)
class VectorSum(UStatistic):
    """Sum of integer vectors with ||v||_1 <= bound. Replacing one moves the sum by at most 2 bound."""

    size: int
    bound: int

    def __post_init__(self) -> None:
        if self.size < 1 or not 1 <= self.bound < _LARGEST_ENTRY:
            raise ValueError(
                f"a sum of vectors of length {self.size} and norm {self.bound} is not defined.\n"
                "HINT: give a positive length, and a bound of the 1-norm below 2^31."
            )

    @property
    def fields(self) -> int:
        return self.size

    @property
    def length(self) -> int:
        return self.size

    @property
    def cost(self) -> int:
        return 2 * self.bound

    def problems(self, records: IntArray) -> list[str]:
        limited = np.clip(records, -self.bound - 1, self.bound + 1)  # |-2^63| is no 64-bit number
        wrong = np.flatnonzero(np.abs(limited).sum(axis=1) > self.bound)
        return [f"the vector of party {i} has a 1-norm above {self.bound}." for i in wrong[:3]]

    def contributions(self, records: IntArray) -> IntArray:
        return records

    def noise(self, source: NamedNoise) -> IntArray:
        return source.at(np.zeros(self.size, dtype=np.int64), np.arange(self.size))


@dataclass(frozen=True)
class Histogram(UStatistic):
    """Counts of 2^levels bins; the record is the bin. Replacing one moves two counts by one."""

    levels: int

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= 16:
            raise ValueError(f"a histogram of 2^{self.levels} bins is not offered.\nHINT: use 1 to 16 levels.")

    @property
    def fields(self) -> int:
        return 1

    @property
    def length(self) -> int:
        return 1 << self.levels

    @property
    def cost(self) -> int:
        return 2

    def problems(self, records: IntArray) -> list[str]:
        return _outside(records[:, 0], self.length)

    def contributions(self, records: IntArray) -> IntArray:
        one_hot: IntArray = (records == np.arange(self.length)).astype(np.int64)
        return one_hot

    def noise(self, source: NamedNoise) -> IntArray:
        return source.at(np.zeros(self.length, dtype=np.int64), np.arange(self.length))


@dataclass(frozen=True)
class ThresholdCounts(UStatistic):
    """Sum of weight * 1[t < x] for each threshold t; the record is (x, weight), x on a grid of 2^levels points.

    With weight 1, n minus the count is n F(t) (004, section 6.4). With the label as weight, the counts are the true
    positives of an ROC curve; the weight is as secret as x. Noise: equation 6.3.1, the sum over the path of t in
    the dyadic tree. The noise of a node belongs to the node, not to the query: any set of thresholds, asked at once
    or one after another, is one release of all 2^levels of them, of cost `interval_cost` (records of equal weight)
    or `suffix_cost` (one of the weights is zero), whichever is larger.
    """

    levels: int
    thresholds: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= LARGEST_LEVELS:
            raise ValueError(
                f"a grid of 2^{self.levels} points is not offered.\nHINT: use 1 to {LARGEST_LEVELS} levels."
            )
        wrong = [t for t in self.thresholds if not 0 <= t < 1 << self.levels]
        if wrong or not self.thresholds:
            raise ValueError(
                f"thresholds {list(self.thresholds)[:5]} are not points of the grid 0 .. {(1 << self.levels) - 1}.\n"
                "HINT: pass indices of grid points, at least one."
            )

    def at(self, thresholds: tuple[int, ...]) -> ThresholdCounts:
        """Returns these counts at other thresholds."""
        return replace(self, thresholds=tuple(int(t) for t in thresholds))

    @property
    def fields(self) -> int:
        return 2

    @property
    def length(self) -> int:
        return len(self.thresholds)

    @property
    def cost(self) -> int:
        return _threshold_cost(self.levels)

    def problems(self, records: IntArray) -> list[str]:
        weights = records[:, 1]
        wrong = np.flatnonzero((weights != 0) & (weights != 1))
        found = [f"the weight {weights[i]} of party {i} is neither 0 nor 1." for i in wrong[:3]]
        return found + _outside(records[:, 0], 1 << self.levels)

    def contributions(self, records: IntArray) -> IntArray:
        below = np.asarray(self.thresholds, dtype=np.int64) < records[:, :1]
        weighted: IntArray = below * records[:, 1:]
        return weighted

    def noise(self, source: NamedNoise) -> IntArray:
        points = np.asarray(self.thresholds, dtype=np.int64)
        levels = np.broadcast_to(np.arange(self.levels + 1)[:, None], (self.levels + 1, points.size))
        total: IntArray = source.at(levels, points >> levels).sum(axis=0)
        return total


@functools.lru_cache(maxsize=LARGEST_LEVELS)
def _threshold_cost(levels: int) -> int:
    fan_outs = (2,) * levels
    return max(interval_cost(fan_outs), suffix_cost(fan_outs))


def _outside(values: IntArray, points: int) -> list[str]:
    wrong = np.flatnonzero((values < 0) | (values >= points))
    return [f"the value {values[i]} of party {i} is outside the grid 0 .. {points - 1}." for i in wrong[:3]]
