"""Estimates counts from noisy counts of all nodes of a wide tree by least squares: the pure-epsilon factorisation.

A factorisation of the prefix sums P = B T: the counts T x of every node are released with Laplace noise, and B is the
least-squares estimate of the prefixes (Hay et al. 2010; the width matters, Qardaji et al. 2013). A record is counted
once per level, so adding or removing it costs one per level and replacing it two; the root is not measured if the total
is public. The estimate is post-processing, takes linear time, and is exact for equal variances.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lipdp_lightning.curves.discrete_noise import FloatArray
from lipdp_lightning.curves.tree import level_sizes


def hierarchy_cost(fan_outs: Sequence[int], adjacency: str, curves: int) -> int:
    """Returns the L1 sensitivity of the measured counts."""
    if adjacency == "add_remove":
        return len(fan_outs) + 1
    return 2 * len(fan_outs) if curves == 1 else 2 * (len(fan_outs) + 1)


def level_counts(histogram: FloatArray, fan_outs: Sequence[int]) -> list[FloatArray]:
    """Returns T x: counts (..., nodes) per level, root first. The last axis is padded with empty leaves."""
    leaves = level_sizes(fan_outs)[-1]
    padding = [(0, 0)] * (histogram.ndim - 1) + [(0, leaves - histogram.shape[-1])]
    counts = [np.pad(histogram, padding)]
    for fan_out in reversed(fan_outs):
        counts.append(_children(counts[-1], fan_out).sum(axis=-1))
    return counts[::-1]


def _children(nodes: FloatArray, fan_out: int) -> FloatArray:
    return nodes.reshape(*nodes.shape[:-1], -1, fan_out)


def _subtree_variances(fan_outs: Sequence[int]) -> list[float]:
    """Returns the variance of a node's best estimate from its subtree alone, root first, for measurements of variance
    one.
    """
    variances = [1.0]
    for fan_out in reversed(fan_outs):
        variances.append(1 / (1 + 1 / (fan_out * variances[-1])))
    return variances[::-1]


def estimate_prefixes(measured: Sequence[FloatArray], fan_outs: Sequence[int], root_known: bool) -> FloatArray:
    """Returns least-squares prefix sums (..., leaves) of noisy counts per level; an exact root is kept."""
    variances = _subtree_variances(fan_outs)
    below = [measured[-1]]
    for level in range(len(fan_outs) - 1, -1, -1):
        children = _children(below[0], fan_outs[level]).sum(axis=-1)
        share = 1.0 if level or not root_known else 0.0
        # the node's own measurement has variance 1, and the sum of its children fan_out * their variance
        weight = share / (1 + fan_outs[level] * variances[level + 1])
        below.insert(0, measured[level] + weight * (children - measured[level]))
    total = below[0]
    for level, fan_out in enumerate(fan_outs):
        children = _children(below[level + 1], fan_out)
        children = children + ((total - children.sum(axis=-1)) / fan_out)[..., None]
        total = children.reshape(below[level + 1].shape)
    return np.cumsum(total, axis=-1)


def prefix_variances(fan_outs: Sequence[int], root_known: bool) -> FloatArray:
    """Returns the exact variance of every estimated prefix, for measurements of variance one.

    Within a node, prefix = alpha * (estimate of the node) + a rest of variance rho, independent of it; children are
    exchangeable given their parent, which gives alpha and rho of the parent from those of the children.
    """
    variances = _subtree_variances(fan_outs)
    alpha, rho = np.ones(1), np.zeros(1)
    for level in range(len(fan_outs) - 1, -1, -1):
        fan_out = fan_outs[level]
        before = np.arange(fan_out)[:, None]  # children wholly inside the prefix
        spread = before + alpha**2 - (before + alpha) ** 2 / fan_out
        rho = (variances[level + 1] * spread + rho).reshape(-1)
        alpha = ((before + alpha) / fan_out).reshape(-1)
    return rho if root_known else rho + alpha**2 * variances[0]


def best_fan_outs(levels: int, adjacency: str, curves: int) -> tuple[int, ...]:
    """Returns the tree of 2^levels leaves, with powers of two as widths, of least mean variance at equal epsilon."""
    known = adjacency == "replace_one" and curves == 1

    def error(fan_outs: tuple[int, ...]) -> float:
        variance = float(np.mean(prefix_variances(fan_outs, known)[: (1 << levels) - 1]))
        return variance * hierarchy_cost(fan_outs, adjacency, curves) ** 2

    return min((_split(levels, parts) for parts in range(1, levels + 1)), key=error)


def _split(levels: int, parts: int) -> tuple[int, ...]:
    size, longer = divmod(levels, parts)
    return tuple(1 << (size + (k < longer)) for k in range(parts))
