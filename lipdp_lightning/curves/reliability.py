"""Computes reliability diagrams: per bin of predicted probability, how often the label is 1, with noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from lipdp_lightning.curves.discrete_noise import FloatArray, IntArray, NoiseSource, discrete_laplace, exact_scale
from lipdp_lightning.curves.releases import CurveRelease, check_privacy
from lipdp_lightning.curves.roc import check_labels

UNIT = 1 << 16  # probabilities are integers in this fixed point, so that their noise is exact


def check_probabilities(values: npt.ArrayLike) -> FloatArray:
    data = np.asarray(values, dtype=np.float64).reshape(-1)
    if not bool(np.all((data >= 0) & (data <= 1))):
        raise ValueError("a predicted probability is not in [0, 1]. HINT: apply a sigmoid or a softmax first.")
    return data


def half_open(values: FloatArray, thresholds: FloatArray) -> IntArray:
    """Returns the group of each value among (t_{q-1}, t_q], the first closed at t_0; every value is in exactly one.

    In 004, Algorithm 10 closes the groups at both ends: a value on a threshold is then counted twice, and one record
    changes twice as much.
    """
    return np.clip(np.searchsorted(thresholds[1:], values, side="left"), 0, len(thresholds) - 2).astype(np.int64)


def reliability_cost(bins: int, adjacency: str) -> Fraction:
    """Returns the L1 sensitivity: a record adds one to a count, and at most half a bin to a sum of (p - middle of its
    bin).
    """
    one = 1 + Fraction(1, 2 * bins)
    return one if adjacency == "add_remove" else 2 * one


@dataclass(frozen=True)
class PrivateReliability:
    """Noisy numbers of positives and negatives per bin, and sums of p - (middle of the bin)."""

    edges: FloatArray
    positives: FloatArray
    negatives: FloatArray
    centred: FloatArray
    scale: Fraction
    release: CurveRelease

    @property
    def sizes(self) -> FloatArray:
        return np.maximum(self.positives + self.negatives, 1.0)

    @property
    def observed(self) -> FloatArray:
        """The share of positives, in [0, 1]."""
        return np.clip(self.positives / self.sizes, 0.0, 1.0)

    @property
    def predicted(self) -> FloatArray:
        """The mean predicted probability, within the bin."""
        middle = (self.edges[1:] + self.edges[:-1]) / 2
        return np.clip(middle + self.centred / self.sizes, self.edges[:-1], self.edges[1:])

    def observed_interval(self, confidence: float = 0.95) -> tuple[FloatArray, FloatArray]:
        """Returns bounds on the data's own shares of positives in all bins together; they cover the noise only.

        |noise| > k has probability 2 p^(k+1) / (1 + p), p = exp(-1 / scale), in each of the 2 Q counts.
        """
        p = math.exp(-1 / float(self.scale))
        level = (1 - confidence) / (2 * len(self.positives))
        k = max(0, math.ceil(-math.log(level * (1 + p) / 2) * float(self.scale)) - 1)
        few, many = np.maximum(self.positives - k, 0), np.maximum(self.positives + k, 0)
        low = few / np.maximum(few + np.maximum(self.negatives + k, 0), 1.0)
        high = many / np.maximum(many + np.maximum(self.negatives - k, 0), 1.0)
        empty_possible = self.positives + self.negatives <= 2 * k  # then the share may not exist
        return np.where(empty_possible, 0.0, low), np.where(empty_possible, 1.0, high)

    def expected_error(self) -> float:
        """Returns the expected calibration error, the mean over records of |predicted - observed| in their bin; noise
        increases it.
        """
        weights = np.maximum(self.positives + self.negatives, 0.0)
        return float(weights @ np.abs(self.predicted - self.observed) / max(float(weights.sum()), 1.0))


def private_reliability(
    probabilities: npt.ArrayLike,
    labels: npt.ArrayLike,
    epsilon: float,
    source: NoiseSource,
    bins: int = 10,
    adjacency: str = "replace_one",
) -> PrivateReliability:
    """Releases the diagram, epsilon-DP, on `bins` equal half-open bins of [0, 1].

    Args:
        probabilities: predicted probabilities of the positive class.
        labels: labels 0 and 1.
        epsilon: the epsilon of the whole diagram.
        source: the source of the noise.
        bins: the number of bins.
        adjacency: `replace_one` or `add_remove`.
    """
    check_privacy(epsilon, 0.0, adjacency)
    if bins < 1:
        raise ValueError(f"{bins} bins make no diagram. HINT: use 10.")
    data = check_probabilities(probabilities)
    positive = check_labels(labels, data)
    edges = np.arange(bins + 1) / bins
    group = half_open(data, edges)
    middle = (edges[1:] + edges[:-1]) / 2
    farthest = UNIT // (2 * bins)
    offsets = np.clip(np.rint((data - middle[group]) * UNIT), -farthest, farthest)
    cost = reliability_cost(bins, adjacency)
    scale = exact_scale(cost, epsilon)
    noise = discrete_laplace(source.stream(), 2 * bins, scale).reshape(2, bins)
    fine = discrete_laplace(source.stream(), bins, exact_scale(cost * UNIT, epsilon))
    text = f"discrete Laplace of scale {float(scale):.6g} on {bins} half-open bins, sensitivity {float(cost):.6g}"
    return PrivateReliability(
        edges,
        (np.bincount(group[positive], minlength=bins) + noise[0]).astype(np.float64),
        (np.bincount(group[~positive], minlength=bins) + noise[1]).astype(np.float64),
        (np.bincount(group, weights=offsets, minlength=bins) + fine) / UNIT,
        scale,
        CurveRelease("reliability", text, epsilon, 0.0, adjacency),
    )
