"""Solves the smoothing problem of a tree as a network between the gaps of its leaves, exactly and in near-linear time.

Let G = g + A nu be the wanted curve and w its increments at the gaps 0 .. n: w_0 = G_1, w_i = G_{i+1} - G_i, and w_n =
upper - G_n. A node over the leaves a+1 .. b raises all of them by nu: it adds nu to w_a and takes nu from w_b. So every
node is an edge between two gaps, w = d + B nu with B its incidence matrix, and

    minimise sum nu^2 / 2 subject to d + B nu >= 0

has the solution nu = B'z of  z >= 0,  w = d + B B'z >= 0,  z'w = 0,  in which B B' is the Laplacian of the network: an
obstacle problem. Off the diagonal a Laplacian is not positive, so gaps can be freed one set after the other
(Chandrasekaran 1970): start with z = 0, free every gap with w < 0, solve w = 0 on the free gaps, and repeat. z only
grows, a freed gap stays free, and the end is the solution. With a public end the sum of w is `upper`, so the last gap
is never below zero by itself and the systems are never singular.

The network is outerplanar. Gaps that are interior to a node of the lowest level touch two edges; eliminating them (two
conductances in series) leaves the same kind of network one level higher. A solve is linear in the number of points, and
uses additions, products and quotients of positive numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lipdp_lightning.curves.discrete_noise import BoolArray, FloatArray

_CONTACT = 2.0**100  # conductance of a joint, which makes the gaps on its two sides one gap
_ROUNDING = 1e-12


@dataclass
class _Eliminated:
    """The k-th interior gaps of the nodes of a level, with what is needed to recover their potential."""

    left: FloatArray
    right: FloatArray
    current: FloatArray
    inverse: FloatArray


class GapNetwork:
    """The network of `points` leaves of a tree; leaves beyond them are left out."""

    def __init__(self, points: int, fan_outs: Sequence[int]) -> None:
        self.points = points
        self._fan_outs = tuple(reversed(fan_outs))
        spans = np.concatenate([[1], np.cumprod(self._fan_outs)])
        assert spans[-1] >= points > 0
        # gaps at the ends of each level's nodes, from the leaves to the root; the last is the end of the curve
        self._ends = [np.append(np.arange(0, points, span), points) for span in spans.tolist()]

    def laplacian(self, potential: FloatArray) -> FloatArray:
        """Returns B B'z."""
        found = np.zeros_like(potential)
        for ends in self._ends:
            noise = -np.diff(potential[ends])
            found[ends[:-1]] += noise
            found[ends[1:]] -= noise
        return found

    def solve(self, current: FloatArray, free: BoolArray) -> FloatArray:
        """Returns z with (B B'z)_i = current_i at the free gaps, and 0 elsewhere; at least one gap is not free."""
        levels: list[list[_Eliminated]] = []
        conductance = np.ones(self.points)
        ground = np.zeros(self.points + 1)
        for fan_out in self._fan_outs:
            steps, conductance, ground, current, free = _climb(fan_out, conductance, ground, current, free)
            conductance = conductance + 1  # the level's own nodes
            levels.append(steps)
        potential = _two_gaps(float(conductance[0]), ground, current, free)
        for ends, fan_out, steps in zip(self._ends[-2::-1], self._fan_outs[::-1], levels[::-1], strict=True):
            potential = _descend(fan_out, potential, steps, len(ends))
        return potential


def _climb(
    fan_out: int, conductance: FloatArray, ground: FloatArray, current: FloatArray, free: BoolArray
) -> tuple[list[_Eliminated], FloatArray, FloatArray, FloatArray, BoolArray]:
    """Eliminates the gaps that are not ends of the next level's nodes."""
    edges = len(conductance)
    groups = -(-edges // fan_out)
    missing = groups * fan_out - edges
    # the last node may have fewer children, and joints replace the others
    paths = np.append(conductance, np.full(missing, _CONTACT)).reshape(groups, fan_out)
    shape = (groups, fan_out)
    grounds = np.append(ground[:-1], np.zeros(missing)).reshape(shape)
    currents = np.append(current[:-1], np.zeros(missing)).reshape(shape)
    frees = np.append(free[:-1], np.ones(missing, dtype=np.bool_)).reshape(shape)
    next_ground, next_current = np.append(grounds[:, 0], ground[-1]), np.append(currents[:, 0], current[-1])
    left, steps = paths[:, 0], []
    here_ground, here_current = None, None
    for k in range(1, fan_out):
        right = paths[:, k]
        own_ground = grounds[:, k] if here_ground is None else grounds[:, k] + here_ground
        own_current = currents[:, k] if here_current is None else currents[:, k] + here_current
        inverse = np.where(frees[:, k], 1 / (left + right + own_ground), 0.0)
        # a gap that is not free is grounded
        leak = np.where(frees[:, k], own_ground * inverse, 1.0)
        share = own_current * inverse
        steps.append(_Eliminated(left, right, own_current, inverse))
        next_ground[:-1] += left * leak
        next_current[:-1] += left * share
        here_ground, here_current = right * leak, right * share
        left = left * (right * inverse)
    if here_ground is not None and here_current is not None:
        next_ground[1:] += here_ground
        next_current[1:] += here_current
    return steps, left, next_ground, next_current, np.append(frees[:, 0], free[-1])


def _two_gaps(conductance: float, ground: FloatArray, current: FloatArray, free: BoolArray) -> FloatArray:
    """Returns the potentials of the first and the last gap."""
    potential = np.zeros(2)
    if free.all():
        determinant = ground[0] * ground[1] + conductance * (ground[0] + ground[1])
        potential[0] = (current[0] * (ground[1] + conductance) + current[1] * conductance) / determinant
        potential[1] = (current[1] * (ground[0] + conductance) + current[0] * conductance) / determinant
    elif free.any():
        potential[free] = current[free] / (ground[free] + conductance)
    return potential


def _descend(fan_out: int, potential: FloatArray, steps: list[_Eliminated], size: int) -> FloatArray:
    """Returns the potentials one level lower."""
    groups = len(potential) - 1
    found = np.empty((groups, fan_out))
    found[:, 0] = potential[:-1]
    after = potential[1:]
    for k, step in zip(range(fan_out - 1, 0, -1), reversed(steps), strict=True):
        after = (step.current + step.left * potential[:-1] + step.right * after) * step.inverse
        found[:, k] = after
    return np.append(found.reshape(-1)[: size - 1], potential[-1])


def least_squares_increments(increments: FloatArray, fan_outs: Sequence[int], end_free: bool) -> FloatArray:
    """Returns the w >= 0 nearest to d = `increments` in the sense above; `end_free` requires w_n >= 0 as well."""
    network = GapNetwork(len(increments) - 1, fan_outs)
    free = np.zeros(len(increments), dtype=np.bool_)
    potential, w = np.zeros(len(increments)), increments
    while True:
        low = w < -_ROUNDING * (1 + np.max(np.abs(increments)) + np.max(potential))
        low[-1] &= end_free
        low &= ~free
        if not low.any():
            return np.where(free, 0.0, w)
        free |= low
        potential = network.solve(-increments, free)
        w = increments + network.laplacian(potential)
