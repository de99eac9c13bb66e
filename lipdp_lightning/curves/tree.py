"""Adds noise on the nodes of a tree: every point of a curve gets the sum of the noises on its path (004, eq. 6.3.1).

What it costs. Let C be the counts on the grid, A the matrix of points by nodes (A_iv = 1 if leaf i is below v) and
y = C + A eta with independent noise eta. A neighbouring data set shifts C by an indicator d of consecutive points.
If A x = d, then eta -> eta + x turns one world's noise into the other's, so the privacy loss of Laplace noise of
scale s is at most ||x||_1 / s. Conversely -log of the density of A eta is, far out, the gauge
min{||x||_1 : A x = y} / s up to lower orders, whose slope along d attains its value at d. So the
smallest sound scale is

    s = c / epsilon,    c = max over d of min{ ||x||_1 : A x = d },

a linear program. It is solved in closed form: write x_v = p_v - p_parent(v), p = 0 above the root, p_leaf = d_leaf.
Clipping p to [0, 1] shortens no constraint and lengthens no edge; and sum |p_v - p_parent| is the average over
t in (0, 1) of the number of edges that {p > t} cuts. So some 0/1 labelling of the nodes is optimal and
c counts label changes on edges: the parsimony score of the tree whose leaves carry d and whose root hangs below a 0.
Each edge's score is one of two numbers that differ by at most one, so the largest c over all d is a small dynamic
program (`suffix_cost`, `interval_cost`), for any base. For base 2 and 2^L leaves it gives

* add/remove one record: d is a suffix [a, N], c = ceil((L + 1) / 2) (lemma 6.3.1: this is also theorem 6.3.2);
* replace one record: d = [a, b) without the last leaf, c = L (theorem 6.3.1 has L + 1, which is sound, and not least).

Gaussian noise needs min ||x||_2 instead, at most sqrt(c) because the optimal x above has entries -1, 0, 1, and in
fact about half of that: `lipdp_lightning.curves.tree_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lipdp_lightning.curves.discrete_noise import FloatArray

Labels = tuple[int, int]  # the score if the node above has label 0, and if it has label 1
_ZEROS: Labels = (0, 1)
_ONES: Labels = (1, 0)


LARGEST_BASE = 1 << 22


def uniform_fan_outs(leaves: int, base: int) -> tuple[int, ...]:
    """Returns (base, ..., base), with as many levels as it takes for at least `leaves` leaves."""
    if base < 2:
        raise ValueError(f"base {base} makes no tree. HINT: use 2, or any larger number.")
    if base > LARGEST_BASE:
        raise ValueError(f"base {base} is more than {LARGEST_BASE} children of a node. HINT: use 2, or 16.")
    fan_outs: list[int] = []
    reached = 1
    while reached < leaves:
        reached *= base
        fan_outs.append(base)
    return tuple(fan_outs)


def level_sizes(fan_outs: Sequence[int]) -> tuple[int, ...]:
    """Returns the nodes per level, from the root (1) to the leaves."""
    sizes = [1]
    for fan_out in fan_outs:
        sizes.append(sizes[-1] * fan_out)
    return tuple(sizes)


def path_sums(draw: Callable[[int], FloatArray], fan_outs: Sequence[int], repeats: int = 1) -> FloatArray:
    """Returns A eta, repeats x leaves: for every leaf the sum over its path, root and leaf included.

    `draw(n)` returns n independent values; every node's is drawn once.
    """
    sizes = level_sizes(fan_outs)
    levels = np.split(draw(repeats * sum(sizes)).reshape(repeats, sum(sizes)), np.cumsum(sizes)[:-1], axis=1)
    sums = levels[0]
    for fan_out, level in zip(fan_outs, levels[1:], strict=True):
        sums = np.repeat(sums, fan_out, axis=1) + level
    return sums


def noise_matrix(fan_outs: Sequence[int]) -> FloatArray:
    """Returns A, leaves x nodes, as `path_sums` applies it."""
    nodes = sum(level_sizes(fan_outs))
    return path_sums(lambda count: np.eye(nodes), fan_outs, nodes).T


def _edge(score_if_0: int, score_if_1: int) -> Labels:
    """Returns what a node adds to its parent: its own label is free, and a change on the edge costs one."""
    return min(score_if_0, score_if_1 + 1), min(score_if_1, score_if_0 + 1)


def _sum(*children: Labels) -> Labels:
    return _edge(sum(c[0] for c in children), sum(c[1] for c in children))


def _scores(fan_outs: Sequence[int]) -> tuple[set[Labels], set[Labels]]:
    """Returns scores of all suffixes (by symmetry also prefixes), and of all intervals, from the leaves to the root."""
    suffixes, intervals = {_ONES}, {_ONES}
    for fan_out in reversed(fan_outs):
        inside = {_sum(*[_ZEROS] * (fan_out - 1), one) for one in intervals}
        across = {
            _sum(*[_ZEROS] * (fan_out - 2 - full), *[_ONES] * full, left, right)
            for full in range(fan_out - 1)
            for left in suffixes
            for right in suffixes
        }
        ones = range(fan_out)
        suffixes = {_sum(*[_ZEROS] * (fan_out - 1 - k), *[_ONES] * k, cut) for k in ones for cut in suffixes}
        intervals = inside | across
    return suffixes, intervals


def suffix_cost(fan_outs: Sequence[int]) -> int:
    """Returns the least c that is enough for every suffix: one record more or less."""
    return max(score[0] for score in _scores(fan_outs)[0])


def interval_cost(fan_outs: Sequence[int]) -> int:
    """Returns the least c that is enough for every interval: one record of another value."""
    return max(score[0] for score in _scores(fan_outs)[1])


def tree_cost(fan_outs: Sequence[int], adjacency: str, curves: int) -> int:
    """Returns the cost of one curve whose total is public under replace-one, or of the two curves of a labelled data
    set.

    Two curves, one per class, have independent noise. Adding or removing a record shifts one of them by a suffix: c.
    Replacing one shifts one curve by an interval, or, if the label changes too, both by a suffix: the noises are
    independent, so the programs separate and the costs add, max(interval, 2 suffix). For base 2 that is 2 ceil((L + 1)
    / 2); thesis section 6.5.1 takes two curves of epsilon / 2 each, which is L + 1 per curve, and calls the sum 2
    epsilon instead of epsilon.
    """
    if adjacency == "add_remove":
        return suffix_cost(fan_outs)
    return interval_cost(fan_outs) if curves == 1 else max(interval_cost(fan_outs), curves * suffix_cost(fan_outs))
