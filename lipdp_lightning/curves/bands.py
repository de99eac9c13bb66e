"""Computes confidence bands that include the noise of the release and, on request, that of the sample.

The noise's law is public. K imaginary releases give K + 1 exchangeable values of max_i |noise_i| / deviation_i, the
real one among them, so the ceil((1 - a)(K + 1))-th smallest of the K simulated ones covers it with probability at least
1 - a, whatever K is. The sampling error is that of Dvoretzky, Kiefer and Wolfowitz with Massart's constant: P(sup |F_n
- F| > t) <= 2 exp(-2 n t^2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lipdp_lightning.curves.discrete_noise import FloatArray
from lipdp_lightning.curves.ecdf import PrivateECDF
from lipdp_lightning.curves.mechanism import CurveMechanism

_VALUES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Band:
    """Two non-decreasing bounds with lower <= F <= upper at all points together with the given confidence."""

    lower: FloatArray
    upper: FloatArray
    confidence: float
    includes_sampling: bool

    def quantile_interval(self, edges: FloatArray, probability: float) -> tuple[float, float]:
        """Returns an interval that holds the quantile min{t : F(t) >= probability}, for all probabilities together."""
        first = int(np.searchsorted(self.upper, probability, side="left"))
        last = int(np.searchsorted(self.lower, probability, side="left"))
        size = len(self.upper)
        return float(edges[min(first, size - 1)]), float(edges[min(last + 1, size)])


def noise_width(mechanism: CurveMechanism, alpha: float, repeats: int, generator: np.random.Generator) -> float:
    """Returns w with |noise_i| <= w * deviation_i at all points of all curves with probability at least 1 - alpha."""
    if not 0 < alpha < 1:
        raise ValueError(f"confidence {1 - alpha} is not in (0, 1). HINT: use 0.95.")
    rank = math.ceil((1 - alpha) * (repeats + 1))
    if rank > repeats:
        raise ValueError(
            f"{repeats} simulations cannot resolve a level of {alpha:.3g}. HINT: use {math.ceil(1 / alpha)}."
        )
    deviations = np.sqrt(mechanism.variances())
    noisy = deviations > 0
    at_once = max(1, _VALUES_AT_ONCE // mechanism.size)
    largest = np.zeros(repeats)
    for _ in range(mechanism.curves):
        for start in range(0, repeats, at_once):
            part = slice(start, min(start + at_once, repeats))
            noise = mechanism.simulate(generator, part.stop - part.start)
            scaled = np.max(np.abs(noise[:, noisy]) / deviations[noisy], axis=1, initial=0.0)
            largest[part] = np.maximum(largest[part], scaled)
    return float(np.sort(largest)[rank - 1])


def count_band(counts: FloatArray, mechanism: CurveMechanism, width: float) -> tuple[FloatArray, FloatArray]:
    """Returns bounds on the true counts, which are non-decreasing and not negative; that tightens the raw band for
    free.
    """
    spread = width * np.sqrt(mechanism.variances())
    lower = np.maximum.accumulate(np.maximum(counts - spread, 0.0))
    upper = np.minimum.accumulate((counts + spread)[::-1])[::-1]
    return lower, np.maximum(upper, 0.0)


def as_fractions(lower: FloatArray, upper: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Divides bounds on counts by the last count, which has the last bounds; F ends at 1."""
    low = np.clip(lower / max(float(upper[-1]), 1.0), 0.0, 1.0)
    high = np.clip(upper / max(float(lower[-1]), 1.0), 0.0, 1.0)
    low[-1] = high[-1] = 1.0
    return low, high


def ecdf_band(
    curve: PrivateECDF,
    confidence: float = 0.95,
    sampling: bool = False,
    repeats: int = 399,
    generator: np.random.Generator | None = None,
) -> Band:
    """Returns a band for the empirical function of the data, or with `sampling` for that of the population.

    Args:
        curve: the raw curve, whose noise has the known law, and not a smoothed one.
        confidence: the probability that the band holds at all points together; it is shared equally between noise and
            sampling.
        sampling: whether to include the sampling error.
        repeats: the number of simulations of the noise.
        generator: draws the simulations; a new one by default.
    """
    alpha = (1 - confidence) / (2 if sampling else 1)
    chance = np.random.default_rng() if generator is None else generator
    width = noise_width(curve.mechanism, alpha, repeats, chance)
    lower_counts, upper_counts = count_band(curve.counts, curve.mechanism, width)
    lower, upper = as_fractions(lower_counts, upper_counts)
    if sampling:
        margin = math.sqrt(math.log(2 / alpha) / (2 * max(float(lower_counts[-1]), 1.0)))
        lower, upper = np.maximum(lower - margin, 0.0), np.minimum(upper + margin, 1.0)
    return Band(lower, upper, confidence, sampling)
