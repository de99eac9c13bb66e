"""The privacy of a noise matrix, by linear programming and by exact probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

Array = npt.NDArray[np.float64]


def least_norm(matrix: Array, shift: Array) -> float:
    """min ||x||_1 with matrix x = shift; infinite if no noise explains the shift."""
    columns = matrix.shape[1]
    result = linprog(
        np.ones(2 * columns), A_eq=np.hstack([matrix, -matrix]), b_eq=shift, bounds=(0, None), method="highs"
    )
    return float(result.fun) if result.status == 0 else np.inf


def worst_test(matrix: Array, shift: Array) -> Array:
    """The linear statistic that tells the shift best: w with |w'matrix| <= 1 and the largest w'shift."""
    rows = matrix.shape[0]
    bounds = np.ones(2 * matrix.shape[1])
    result = linprog(-shift, A_ub=np.vstack([matrix.T, -matrix.T]), b_ub=bounds, bounds=[(None, None)] * rows)
    return np.asarray(result.x)


def suffixes(points: int) -> Iterator[Array]:
    for start in range(points):
        yield (np.arange(points) >= start).astype(np.float64)


def intervals(points: int) -> Iterator[Array]:
    """Changes of the counts when a record moves from a cell to an earlier one: never at the last point."""
    for first, last in itertools.combinations(range(points), 2):
        yield ((np.arange(points) >= first) & (np.arange(points) < last)).astype(np.float64)


def single_shifts(points: int, adjacency: str) -> list[Array]:
    """What one record changes of one curve, up to the sign."""
    return list(suffixes(points) if adjacency == "add_remove" else intervals(points))


def pair_shifts(points: int, adjacency: str) -> list[Array]:
    """What one record changes of the positives' and the negatives' curve, stacked, up to the sign."""
    nothing = np.zeros(points)
    alone = [np.concatenate([s, nothing]) for s in single_shifts(points, adjacency)]
    if adjacency == "add_remove":
        return alone
    return alone + [np.concatenate([a, -b]) for a in suffixes(points) for b in suffixes(points)]


def largest_cost(matrix: Array, shifts: list[Array]) -> float:
    return max(least_norm(matrix, shift) for shift in shifts)
