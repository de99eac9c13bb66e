"""Finds the least absolute noises of a binary tree, exactly and in near-linear time (see
`lipdp_lightning.curves.gaps`).

    minimise sum |nu| subject to w = d + B nu >= 0

is the dual of: maximise -d'z over potentials z >= 0 that differ by at most one along every edge. Its vertices are
integers (B is totally unimodular), none above the network's diameter, so z is found by dynamic programming over the
nodes: a node's best value depends on the potentials of its two gaps only. nu is then a flow that may be positive only
where z falls by one along the edge, negative only where it rises by one, and that makes w = 0 where z > 0. The flows
(s, t) that a node and its descendants can bring to its two gaps are the points of

    s in [s_low, s_high],   t in [t_low, t_high],   s + t in [low, high],

because sets of flows through a network keep this form (generalised polymatroids) when edges are added and gaps are
joined. They are computed from the leaves to the root, and flows are chosen from the root to the leaves. In the end the
two objectives are equal, which proves the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lipdp_lightning.curves.discrete_noise import BoolArray, FloatArray, IntArray

_AGREEMENT = 1e-7


def least_absolute_increments(increments: FloatArray, levels: int, end_free: bool) -> FloatArray:
    """Returns one w of the least sum |nu|; `end_free` requires w_n >= 0 as well."""
    z = best_potentials(-increments, levels, end_free)
    w, size = flows(increments, z, end_free)
    checked = w if end_free else w[:-1]
    tolerance = _AGREEMENT * (1 + float(np.sum(np.abs(increments))))
    assert abs(size + float(increments @ z)) <= tolerance, "the objectives of the two problems differ"
    assert float(np.min(checked)) >= -tolerance and float(np.max(np.abs(w[z > 0]), initial=0.0)) <= tolerance
    return np.where(z > 0, 0.0, np.maximum(w, 0.0))


# ---- potentials


def best_potentials(gains: FloatArray, levels: int, end_free: bool) -> IntArray:
    """Returns argmax gains'z over integers z >= 0 with |z_a - z_b| <= 1 for every node's gaps; z_n = 0 unless
    `end_free`.

    values[j, x, k] is the best value strictly between the gaps of node j, given x and x + k - 1 at them.
    """
    most = levels + 2
    x = np.arange(most)
    inside = (x[:, None] + np.array([-1, 0, 1]) >= 0) & (x[:, None] + np.array([-1, 0, 1]) < most)
    values = np.broadcast_to(np.where(inside, 0.0, -np.inf), (len(gains) - 1, most, 3))
    middle = gains[1:-1]
    choices: list[npt.NDArray[np.int8]] = []
    while len(values) > 1:
        pairs = len(values) // 2
        joined, choice = _join_values(
            values[0 : 2 * pairs : 2], values[1 : 2 * pairs : 2], middle[0::2][:pairs], inside
        )
        choices.append(choice)
        values = np.concatenate([joined, values[2 * pairs :]])
        middle = middle[1::2]
    total = values[0] + gains[0] * x[:, None] + gains[-1] * (x[:, None] + np.array([-1, 0, 1]))
    if not end_free:
        total = np.where(x[:, None] + np.array([-1, 0, 1]) == 0, total, -np.inf)
    first, step = np.unravel_index(int(np.argmax(total)), total.shape)
    z = np.array([first, first + step - 1])
    for choice in reversed(choices):
        z = _between(z, choice)
    return z.astype(np.int64)


def _join_values(
    left: FloatArray, right: FloatArray, gains: FloatArray, inside: BoolArray
) -> tuple[FloatArray, npt.NDArray[np.int8]]:
    pairs, most, _ = left.shape
    padded = np.full((pairs, most + 2, 3), -np.inf)
    padded[:, 1:-1] = right + (gains[:, None] * np.arange(most))[:, :, None]  # the middle gap's own gain
    best = np.full((pairs, most, 3), -np.inf)
    choice = np.zeros((pairs, most, 3), dtype=np.int8)
    for k in range(3):  # the right end is k - 1 above the left one
        for a in range(3):  # the middle is a - 1 above the left end
            rest = k - a + 1
            if 0 <= rest < 3:
                found = left[:, :, a] + padded[:, a : a + most, rest]
                better = found > best[:, :, k]
                best[:, :, k][better] = found[better]
                choice[:, :, k][better] = a
    best[:, ~inside] = -np.inf
    return best, choice


def _between(z: IntArray, choice: npt.NDArray[np.int8]) -> IntArray:
    """Returns the potentials of a level's gaps and of the middle ones below."""
    pairs = len(choice)
    middle = z[:pairs] + choice[np.arange(pairs), z[:pairs], z[1 : pairs + 1] - z[:pairs] + 1] - 1
    found = np.empty(len(z) + pairs, dtype=np.int64)
    found[0 : 2 * pairs : 2], found[1 : 2 * pairs : 2] = z[:pairs], middle
    found[2 * pairs :] = z[pairs:]
    return found


# ---- flows


@dataclass
class _Sets:
    """The bounds of the flows of a level's nodes, one row each; every bound is attained."""

    s_low: FloatArray
    s_high: FloatArray
    t_low: FloatArray
    t_high: FloatArray
    low: FloatArray
    high: FloatArray

    def part(self, rows: slice) -> _Sets:
        return _Sets(*(bound[rows] for bound in vars(self).values()))

    def then(self, other: _Sets) -> _Sets:
        return _Sets(*map(np.append, vars(self).values(), vars(other).values()))

    def through(self, edge_low: FloatArray, edge_high: FloatArray) -> _Sets:
        """Returns the bounds together with the node's own edge, which brings (nu, -nu)."""
        return _Sets(
            self.s_low + edge_low, self.s_high + edge_high, self.t_low - edge_high, self.t_high - edge_low,
            self.low, self.high,
        )  # fmt: skip


@dataclass
class _Join:
    """Two children and the gap between them, whose increment d + t + s is zero, or (`slack`) at least zero."""

    left: _Sets
    right: _Sets
    wanted: FloatArray
    slack: BoolArray

    def sets(self) -> _Sets:
        left, right = self.left, self.right
        most = np.where(self.slack, np.inf, self.wanted - right.s_low)
        s_low = np.maximum(left.s_low, left.low - np.minimum(left.t_high, most))
        s_high = np.minimum(left.s_high, left.high - np.maximum(left.t_low, self.wanted - right.s_high))
        most = np.where(self.slack, np.inf, self.wanted - left.t_low)
        t_low = np.maximum(right.t_low, right.low - np.minimum(right.s_high, most))
        t_high = np.minimum(right.t_high, right.high - np.maximum(right.s_low, self.wanted - left.t_high))
        return _Sets(s_low, s_high, t_low, t_high, *self._sums())

    def _sums(self) -> tuple[FloatArray, FloatArray]:
        """Returns bounds of s + t: convex and concave in the flow t from the left, flat between their two corners."""
        left, right = self.left, self.right
        total = np.where(self.slack, left.t_high + right.s_high, self.wanted)
        t = self._from_left(left.low - left.s_low, total, left, right)
        low = np.maximum(left.s_low, left.low - t) + np.maximum(right.t_low, right.low - (total - t))
        total = np.where(self.slack, np.maximum(self.wanted, left.t_low + right.s_low), self.wanted)
        t = self._from_left(left.high - left.s_high, total, left, right)
        return low, np.minimum(left.s_high, left.high - t) + np.minimum(right.t_high, right.high - (total - t))

    @staticmethod
    def _from_left(t: FloatArray, total: FloatArray, left: _Sets, right: _Sets) -> FloatArray:
        return _clip(t, np.maximum(left.t_low, total - right.s_high), np.minimum(left.t_high, total - right.s_low))

    def split(self, s: FloatArray, t: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns the flows to the gap between, from the left and from the right, given those to the outer gaps."""
        left, right = self.left, self.right
        low, high = np.maximum(left.t_low, left.low - s), np.minimum(left.t_high, left.high - s)
        right_low, right_high = np.maximum(right.s_low, right.low - t), np.minimum(right.s_high, right.high - t)
        total = np.where(self.slack, np.maximum(self.wanted, low + right_low), self.wanted)
        from_left = _clip(total / 2, np.maximum(low, total - right_high), np.minimum(high, total - right_low))
        return from_left, total - from_left


@dataclass
class _Level:
    """Nodes of one height: their gaps, the flows of their children, the bounds of their own edges, and their pairs."""

    ends: IntArray
    inner: _Sets
    edge_low: FloatArray
    edge_high: FloatArray
    join: _Join | None = None

    def own(self, s: FloatArray, t: FloatArray) -> FloatArray:
        """Returns nu on the own edges for given flows to the gaps, the smallest that the children can complete."""
        low = np.maximum(self.edge_low, np.maximum(s - self.inner.s_high, self.inner.t_low - t))
        high = np.minimum(self.edge_high, np.minimum(s - self.inner.s_low, self.inner.t_high - t))
        return _clip(np.zeros_like(s), low, high)


def flows(d: FloatArray, z: IntArray, end_free: bool) -> tuple[FloatArray, float]:
    """Returns d + B nu and sum |nu| for a flow nu that fits the best potentials z; parallel edges count as one."""
    heights = _gather(d, z)
    s, t = _at_the_ends(heights[-1], d, z, end_free)
    increments, size = d.copy(), 0.0
    for level, below in zip(reversed(heights), [*reversed(heights[:-1]), None], strict=True):
        noise = level.own(s, t)
        increments[level.ends[:-1]] += noise
        increments[level.ends[1:]] -= noise
        size += float(np.sum(np.abs(noise)))
        if below is not None and below.join is not None:
            s, t = _to_children(below.join, s - noise, t + noise)
    return increments, size


def _gather(d: FloatArray, z: IntArray) -> list[_Level]:
    """Gathers the levels, from the leaves to a single node."""
    largest = 1.0 + float(np.sum(np.abs(d)))  # no flow without cycles is larger
    ends = np.arange(len(d))
    none = np.zeros(len(d) - 1)
    inner = _Sets(none, none, none, none, none, none)
    found = []
    while True:
        fall = -np.diff(z[ends])
        level = _Level(ends, inner, np.where(fall == -1, -largest, 0.0), np.where(fall == 1, largest, 0.0))
        found.append(level)
        if len(ends) == 2:
            return found
        sets = inner.through(level.edge_low, level.edge_high)
        pairs = (len(ends) - 1) // 2
        middle = ends[1 : 2 * pairs : 2]
        level.join = _Join(
            sets.part(slice(0, 2 * pairs, 2)), sets.part(slice(1, 2 * pairs, 2)), -d[middle], z[middle] == 0
        )
        inner = level.join.sets().then(sets.part(slice(2 * pairs, None)))
        ends = np.append(ends[:-1:2], ends[-1])


def _at_the_ends(top: _Level, d: FloatArray, z: IntArray, end_free: bool) -> tuple[FloatArray, FloatArray]:
    """Returns flows to the first and the last gap: w = 0 there, or w >= 0 where z = 0, or anything at an open end."""
    sets = top.inner.through(top.edge_low, top.edge_high)
    s_low, s_high = np.maximum(sets.s_low, -d[0]), np.minimum(sets.s_high, np.inf if z[0] == 0 else -d[0])
    t_low = np.maximum(sets.t_low, -d[-1] if end_free else -np.inf)
    t_high = np.minimum(sets.t_high, np.inf if z[-1] == 0 else -d[-1])
    s = _clip(np.zeros(1), np.maximum(s_low, sets.low - t_high), np.minimum(s_high, sets.high - t_low))
    return s, _clip(np.zeros(1), np.maximum(t_low, sets.low - s), np.minimum(t_high, sets.high - s))


def _to_children(join: _Join, s: FloatArray, t: FloatArray) -> tuple[FloatArray, FloatArray]:
    pairs = len(join.wanted)
    from_left, from_right = join.split(s[:pairs], t[:pairs])
    child_s, child_t = np.empty(len(s) + pairs), np.empty(len(s) + pairs)
    child_s[0 : 2 * pairs : 2], child_t[0 : 2 * pairs : 2] = s[:pairs], from_left
    child_s[1 : 2 * pairs : 2], child_t[1 : 2 * pairs : 2] = from_right, t[:pairs]
    child_s[2 * pairs :], child_t[2 * pairs :] = s[pairs:], t[pairs:]
    return child_s, child_t


def _clip(value: FloatArray, low: FloatArray, high: FloatArray) -> FloatArray:
    return np.minimum(np.maximum(value, low), high)
