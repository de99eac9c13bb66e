"""Releases the private ROC curve and the area under it: two distribution functions, of the scores of each class.

A larger score means the positive class (004, 6.5.1 has it the other way round). A threshold t predicts "positive" for
scores above it: TPR(t) = 1 - F_1(t), FPR(t) = 1 - F_0(t).

Privacy: the pair is released as one query with the joint scale of `tree_cost(.., curves=2)`, for base 2 2 ceil((L + 1)
/ 2) / epsilon under replace-one and ceil((L + 1) / 2) / epsilon under add/remove: a record of another label shifts one
curve by +[a, N] and the other by -[b, N], whose costs add, and a record of the same label shifts one curve by an
interval, which costs L, no more. The class sizes are private under both relations (a replaced record may change its
label), so the last points are noisy. The two curves have independent noise: with the same noise their difference would
be released exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lipdp_lightning.curves.bands import as_fractions, count_band, noise_width
from lipdp_lightning.curves.cells import Grid
from lipdp_lightning.curves.discrete_noise import BoolArray, FloatArray, NoiseSource
from lipdp_lightning.curves.mechanism import CurveMechanism
from lipdp_lightning.curves.releases import CurveRelease
from lipdp_lightning.curves.smooth import smooth

_ROUNDING = 1e-12  # relative to an area, so that without noise the interval still holds it


def check_labels(labels: npt.ArrayLike, values: npt.ArrayLike) -> BoolArray:
    """Returns labels as booleans; they must be 0 or 1, one for every value."""
    found = np.asarray(labels).reshape(-1)
    if found.size != np.asarray(values).size:
        raise ValueError(f"{found.size} labels for {np.asarray(values).size} values. HINT: give one label per value.")
    if not bool(np.all((found == 0) | (found == 1))):
        raise ValueError("a label is neither 0 nor 1. HINT: name the positive class.")
    return found.astype(np.bool_)


def area_under_curve(positives: FloatArray, negatives: FloatArray) -> float:
    """Returns P(score of a positive > score of a negative) + P(=) / 2 from cumulative counts or fractions per cell."""
    below = (negatives + np.concatenate([[0.0], negatives[:-1]])) / 2
    area = float(np.diff(positives, prepend=0.0) @ below)
    return area / (float(positives[-1]) * float(negatives[-1]))


@dataclass(frozen=True)
class PrivateROC:
    """Noisy cumulative counts of the positives' and the negatives' scores."""

    grid: Grid
    mechanism: CurveMechanism
    positives: FloatArray
    negatives: FloatArray

    def smoothed(self, p: int = 2, metric: str = "points") -> PrivateROC:
        """Returns both curves made monotone, by post-processing."""
        tree = self.mechanism.fan_outs if self.mechanism.name in ("laplace", "gaussian") else ()
        first, second = (smooth(c, p, metric, tree) for c in (self.positives, self.negatives))
        return PrivateROC(self.grid, self.mechanism, first, second)

    @property
    def true_positive_rate(self) -> FloatArray:
        """The rate at the thresholds low, tau_1, .., tau_N: from 1 to 0 for the smoothed curves."""
        return _rates(self.positives)

    @property
    def false_positive_rate(self) -> FloatArray:
        return _rates(self.negatives)

    def auc(self) -> float:
        """Returns the area under the smoothed curves; ties that the grid makes count half."""
        curve = self.smoothed()
        if min(curve.positives[-1], curve.negatives[-1]) <= 0:
            return 0.5  # the noise leaves nothing of a class
        return area_under_curve(curve.positives, curve.negatives)

    def auc_interval(
        self, confidence: float = 0.95, repeats: int = 399, generator: np.random.Generator | None = None
    ) -> tuple[float, float]:
        """Returns an interval that holds the area of the data's own grid curve with the given confidence, without
        sampling error.

        The area falls as F_1 rises and rises with F_0, so the ends of a simultaneous band for both are its extremes.
        """
        chance = np.random.default_rng() if generator is None else generator
        width = noise_width(self.mechanism, 1 - confidence, repeats, chance)
        low_1, high_1 = as_fractions(*count_band(self.positives, self.mechanism, width))
        low_0, high_0 = as_fractions(*count_band(self.negatives, self.mechanism, width))
        low, high = area_under_curve(high_1, low_0), area_under_curve(low_1, high_0)
        return max(low - _ROUNDING, 0.0), min(high + _ROUNDING, 1.0)

    def booking(self, name: str = "roc") -> CurveRelease:
        return self.mechanism.booking(name)


def _rates(counts: FloatArray) -> FloatArray:
    return np.concatenate([[1.0], 1.0 - counts / max(float(counts[-1]), 1.0)])


def private_roc(
    scores: npt.ArrayLike,
    labels: npt.ArrayLike,
    grid: Grid,
    mechanism: CurveMechanism,
    source: NoiseSource,
    clamp: bool = False,
) -> PrivateROC:
    """Releases both classes' counts on a public grid, epsilon-DP together.

    Args:
        scores: the private scores; larger ones mean the positive class.
        labels: labels 0 and 1.
        grid: the public grid of scores.
        mechanism: a mechanism for two curves, with the levels of the grid.
        source: the source of the noise.
        clamp: whether to move scores outside the range to its ends.
    """
    assert mechanism.curves == 2 and mechanism.levels == grid.levels
    data = np.asarray(scores, dtype=np.float64).reshape(-1)
    positive = check_labels(labels, data)
    counts = [grid.histogram(data[chosen], clamp) for chosen in (positive, ~positive)]
    first, second = (mechanism.release(count, source) for count in counts)
    return PrivateROC(grid, mechanism, first, second)
