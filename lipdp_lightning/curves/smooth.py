"""Finds the nearest non-decreasing curve in range to a noisy one, by post-processing, which costs nothing (004, 6.3.6).

There are two readings of "nearest", each for p = 1 and p = 2:

* `points`: sum_i |G_i - F_i|^p over the points. Exact and near-linear: pool-adjacent-violators for p = 2, a heap of
  medians for p = 1. Clipping the monotone solution to the range keeps it optimal, because the objective is a sum of
  convex functions of one point each.
* `tree`: the thesis's problem, sum_v |nu_v|^p over the noises that explain the change, G = F + A nu. For p = 1 it is
  the most likely curve under Laplace noise, for p = 2 under Gaussian noise. Exact and near-linear as a network problem
  between the gaps of the leaves: `lipdp_lightning.curves.gaps` (p = 2, any tree) and `gaps_l1` (p = 1, binary trees).
  For p = 1 on other trees it is a general linear program, solved by HiGHS.

`points` with p = 2 moves no value further from a monotone truth than the furthest one was: a band around the raw curve
that holds the truth everywhere is as valid around the smoothed one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from scipy.optimize import isotonic_regression, linprog
from scipy.sparse import coo_array, csr_array, diags_array, eye_array, hstack, vstack

from lipdp_lightning.curves.discrete_noise import FloatArray
from lipdp_lightning.curves.gaps import least_squares_increments
from lipdp_lightning.curves.gaps_l1 import least_absolute_increments
from lipdp_lightning.curves.tree import level_sizes

METRICS = ("points", "tree")


def smooth(
    counts: FloatArray,
    p: int = 2,
    metric: str = "points",
    fan_outs: Sequence[int] = (),
    total: float | None = None,
) -> FloatArray:
    """Returns a non-decreasing curve, at least 0, and at most `total` if that is public (then it ends there).

    `fan_outs` are those of the tree of the noise, for the metric `tree`.
    """
    if p not in (1, 2) or metric not in METRICS:
        raise ValueError(f"p {p} with the metric {metric!r} is unknown. HINT: use p 1 or 2, and metric points or tree.")
    if metric == "tree" and not fan_outs:
        raise ValueError("the metric 'tree' needs noise on a tree. HINT: use the mechanism laplace or gaussian.")
    free = counts if total is None else counts[:-1]
    upper = np.inf if total is None else float(total)
    if metric == "points":
        fitted = np.clip(isotonic_l2(free) if p == 2 else isotonic_l1(free), 0.0, upper)
    else:
        fitted = tree_l2(free, fan_outs, upper) if p == 2 else tree_l1(free, fan_outs, upper)
    return fitted if total is None else np.append(fitted, upper)


def isotonic_l2(values: FloatArray) -> FloatArray:
    """Returns the least squares fit under monotonicity, in linear time."""
    return np.asarray(isotonic_regression(values).x, dtype=np.float64)


def isotonic_l1(values: FloatArray) -> FloatArray:
    """Returns the fit of least absolute deviations under monotonicity, in O(n log n).

    The heap holds the breakpoints left of the minimum of the convex, piecewise linear function z -> min{ sum_{j <= i}
    |g_j - x_j| : g_1 <= .. <= g_i <= z }; its top is the smallest best g_i.
    """
    heap: list[float] = []
    tops = np.empty(len(values))
    for i, x in enumerate(values.tolist()):
        heapq.heappush(heap, -x)
        if -heap[0] > x:
            heapq.heapreplace(heap, -x)
        tops[i] = -heap[0]
    return np.asarray(np.minimum.accumulate(tops[::-1])[::-1])


def tree_l2(values: FloatArray, fan_outs: Sequence[int], upper: float = np.inf) -> FloatArray:
    """Returns argmin over monotone G in [0, upper] of min{ ||nu||_2^2 : G = values + A nu }."""
    increments = least_squares_increments(_increments(values, upper), fan_outs, bool(np.isfinite(upper)))
    return _summed(increments, upper)


def tree_l1(values: FloatArray, fan_outs: Sequence[int], upper: float = np.inf) -> FloatArray:
    """Returns an argmin over monotone G in [0, upper] of min{ ||nu||_1 : G = values + A nu }."""
    if any(fan_out != 2 for fan_out in fan_outs):
        return tree_l1_program(values, fan_outs, upper)
    increments = least_absolute_increments(_increments(values, upper), len(fan_outs), bool(np.isfinite(upper)))
    return _summed(increments, upper)


def _increments(values: FloatArray, upper: float) -> FloatArray:
    """Returns the increments up to the first point, between the points, and up to the public end; 0 if there
    is none.
    """
    end = upper if np.isfinite(upper) else float(values[-1])
    return np.diff(values, prepend=0.0, append=end)


def _summed(increments: FloatArray, upper: float) -> FloatArray:
    return np.clip(np.cumsum(np.maximum(increments[:-1], 0.0)), 0.0, upper)


def tree_l1_program(values: FloatArray, fan_outs: Sequence[int], upper: float = np.inf) -> FloatArray:
    """Solves the problem of `tree_l1` for any tree, as a sparse linear program, by HiGHS."""
    edges, constraints, bounds = _tree_problem(values, fan_outs, upper)
    nodes = edges.shape[0]
    identity = eye_array(nodes)
    # the variables are path sums, and the sizes of the noises that lead from one to the next
    inequalities = vstack([hstack([edges, -identity]), hstack([-edges, -identity])])
    inequalities = vstack([inequalities, hstack([-constraints, csr_array((len(bounds), nodes))])]).tocsr()
    cost = np.concatenate([np.zeros(nodes), np.ones(nodes)])
    limits = np.concatenate([np.zeros(2 * nodes), -bounds])
    result = linprog(cost, A_ub=inequalities, b_ub=limits, bounds=(None, None), method="highs-ipm")
    assert result.status == 0, result.message  # a constant is feasible
    path_sums = result.x[:nodes][-level_sizes(fan_outs)[-1] :][: len(values)]
    # a decrease within the solver's tolerance is removed
    return np.clip(np.maximum.accumulate(values + path_sums), 0.0, upper)


def _tree_problem(values: FloatArray, fan_outs: Sequence[int], upper: float) -> tuple[csr_array, csr_array, FloatArray]:
    """Returns noises nu = edges @ paths, and the constraints `constraints @ paths >= bounds`; nodes are numbered by
    level.
    """
    sizes = level_sizes(fan_outs)
    nodes = sum(sizes)
    parents = np.full(nodes, -1)
    start = 1
    for fan_out, size in zip(fan_outs, sizes[1:], strict=True):
        parents[start : start + size] = start - size // fan_out + np.arange(size) // fan_out
        start += size
    index = np.arange(1, nodes)
    below = coo_array((np.ones(nodes - 1), (index, parents[1:])), shape=(nodes, nodes))
    edges = (eye_array(nodes) - below).tocsr()
    points = len(values)
    leaves = nodes - sizes[-1] + np.arange(points)
    pick = coo_array((np.ones(points), (np.arange(points), leaves)), shape=(points, nodes)).tocsr()
    step = diags_array([-np.ones(points - 1), np.ones(points - 1)], offsets=[0, 1], shape=(points - 1, points))
    blocks, bounds = [step @ pick, pick[[0]]], [-np.diff(values), -values[:1]]
    if np.isfinite(upper):
        blocks.append(-pick[[points - 1]])
        bounds.append(values[-1:] - upper)
    return edges, vstack(blocks).tocsr(), np.concatenate(bounds)
