"""Computes quantiles by bisection (004, Algorithm 9), and histograms, as post-processing of a released curve."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lipdp_lightning.curves.discrete_noise import FloatArray
from lipdp_lightning.curves.ecdf import PrivateECDF


def crossing(fractions: FloatArray, probability: float) -> int:
    """Returns by bisection an i with F(tau_i) >= probability and F(tau_{i-1}) below it (F = 0 before the first point).

    It takes L evaluations. A curve that is not monotone may cross more than once; one crossing is found.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"probability {probability} is not in [0, 1].")
    low, high = -1, len(fractions) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if fractions[middle] < probability:
            low = middle
        else:
            high = middle
    return high


def quantile(curve: PrivateECDF, probability: float) -> float:
    """Returns the middle of the cell in which the curve reaches the probability, within half a cell of its quantile."""
    index = crossing(curve.fractions, probability)
    edges = curve.grid.edges
    return float((edges[index] + edges[index + 1]) / 2)


@dataclass(frozen=True)
class PrivateHistogram:
    """Counts of the bins (edges_i, edges_{i+1}] and the standard deviation of their noise."""

    edges: FloatArray
    counts: FloatArray
    deviations: FloatArray


def histogram(curve: PrivateECDF, bins: int, repeats: int = 400) -> PrivateHistogram:
    """Returns differences of the released counts at the ends of `bins` equal bins; nothing more is released.

    A bin's noise is the difference of two points' noises, in which their common part cancels; its deviation is
    simulated.
    """
    if bins < 1 or curve.grid.size % bins:
        raise ValueError(f"{bins} bins do not divide {curve.grid.size} cells. HINT: use a power of two.")
    ends = np.arange(1, bins + 1) * (curve.grid.size // bins) - 1
    noise = curve.mechanism.simulate(np.random.default_rng(), repeats)[:, ends]
    return PrivateHistogram(
        curve.grid.edges[np.concatenate([[0], ends + 1])],
        np.diff(curve.counts[ends], prepend=0.0),
        np.diff(noise, axis=1, prepend=0.0).std(axis=0),
    )
