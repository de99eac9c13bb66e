"""Bounds how far one record shifts Gaussian noise on a tree: max over shifts d of min{ ||x||_2 : A x = d }.

With path sums p as variables (see `lipdp_lightning.curves.tree`) the square is the energy sum_v (p_v - p_parent(v))^2
of an electric network: edges are unit resistors, leaves are held at the voltages d, the root's edge is grounded. Seen
from its parent, a subtree is one voltage source V behind a conductance h that does not depend on d, plus an energy E
spent inside. Children of equal h in parallel have the voltage mean(V) and spend h sum (V_c - mean)^2.

Suffixes are enumerated: one (V, E) per leaf. An interval is a suffix in one child and a prefix in another of their
lowest common ancestor, and its energy falls in the voltages once a = E + h V^2 is given; rounding V down to a grid and
keeping the largest a per grid point is therefore an upper bound, within a few tenths of a percent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lipdp_lightning.curves.discrete_noise import FloatArray

_BINS = 1024
_ROUNDING = 1 + 1e-9


def _conductances(fan_outs: Sequence[int]) -> list[float]:
    """Returns h of a node and its edge, from the leaves (1: the edge alone) to the root."""
    found = [1.0]
    for fan_out in reversed(fan_outs):
        inside = fan_out * found[-1]
        found.append(inside / (1 + inside))
    return found


def _to_ground(fan_outs: Sequence[int]) -> list[float]:
    """Returns the conductance from a node to the ground outside its subtree, all other leaves at zero;
    leaves to root.
    """
    below = _conductances(fan_outs)
    found = [1.0]  # the root's edge
    for height in range(len(fan_outs) - 1, -1, -1):
        siblings = (fan_outs[len(fan_outs) - 1 - height] - 1) * below[height]
        rest = found[-1] + siblings
        found.append(rest / (1 + rest))  # through the node's own edge
    return found[::-1]


def _frontier(voltage: FloatArray, a: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns lower ends of the cells that hold a voltage, and the largest a in each; unchanged if there are few."""
    if len(voltage) <= _BINS:
        return voltage, a
    cell = np.minimum((voltage * _BINS).astype(np.int64), _BINS)
    largest = np.full(_BINS + 1, -np.inf)
    np.maximum.at(largest, cell, a)
    held = np.isfinite(largest)
    return np.arange(_BINS + 1)[held] / _BINS, largest[held]


def _squares(fan_outs: Sequence[int]) -> tuple[float, float]:
    """Returns the largest energy of a suffix and a close upper bound on that of an interval."""
    below, ground = _conductances(fan_outs), _to_ground(fan_outs)
    voltage, energy = np.ones(1), np.zeros(1)  # suffixes within a node of that height, and by symmetry prefixes
    suffix, interval = 0.0, ground[0]  # one leaf alone
    for height, fan_out in enumerate(reversed(fan_outs)):
        h, outside = below[height], ground[height + 1]
        low, a = _frontier(voltage, energy + h * voltage**2)
        full = np.arange(fan_out - 1)[:, None, None]  # whole children between the two cut ones
        inside = fan_out * h
        # sources of voltages V in parallel, and `outside` to the ground: sum h V^2 - (sum h V)^2 / (inside + outside)
        current = h * (low[:, None] + low[None, :] + full)
        energies = a[:, None] + a[None, :] + h * full - current**2 / (inside + outside)
        interval = max(interval, float(np.max(energies, initial=0.0)))
        ones = np.arange(fan_out)[:, None]
        mean = (voltage + ones) / fan_out
        energy = (energy + h * (voltage**2 + ones) - inside * mean**2).reshape(-1)
        voltage = mean.reshape(-1)
    suffix = float(np.max(energy + below[-1] * voltage**2))
    return suffix, max(interval, suffix)


def tree_norm(fan_outs: Sequence[int], adjacency: str, curves: int) -> float:
    """Returns the L2 sensitivity in units of the noise's deviation, for the shifts of `tree_cost`."""
    suffix, interval = _squares(fan_outs)
    if adjacency == "add_remove":
        return math.sqrt(suffix) * _ROUNDING
    return math.sqrt(interval if curves == 1 else max(interval, curves * suffix)) * _ROUNDING
