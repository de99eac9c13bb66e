"""Computes the private Hosmer-Lemeshow statistic (004, Algorithm 10, with half-open groups).

The groups' ends are quantiles of the released distribution of the predictions, which costs c (its L1 sensitivity: L for
a binary tree under replace-one). Each of the 4 Q sums then has Laplace noise. A record is in ONE group and adds p, 1 -
p, y and 1 - y to its sums, 2 in all; replacing it changes them by at most 4. So with scale 1 / epsilon' for all, the
release is (c + 4) epsilon' under replace-one, (c + 2) epsilon' under add/remove (there c = ceil((L + 1) / 2)). With the
thesis's c = L + 1 that is epsilon / (L + 5), with the least sound c = L it is epsilon / (L + 4). The thesis has epsilon
/ (L + 9), because it counts 8 statistics of sensitivity 1 each; since its groups are closed at both ends, a record on
two thresholds is in two groups, and the 8 are then really needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2

from lipdp_lightning.curves.cells import Grid
from lipdp_lightning.curves.discrete_noise import FloatArray, IntArray, NoiseSource, discrete_laplace, exact_scale
from lipdp_lightning.curves.ecdf import private_ecdf
from lipdp_lightning.curves.mechanism import curve_mechanism
from lipdp_lightning.curves.quantiles import crossing
from lipdp_lightning.curves.releases import CurveRelease, ReleaseList
from lipdp_lightning.curves.reliability import UNIT, check_probabilities, half_open
from lipdp_lightning.curves.roc import check_labels

LEAST_EXPECTED = 1.0  # public floor of the denominators, since a noisy expected count may be zero or negative


def group_sums(probabilities: FloatArray, positive: npt.NDArray[np.bool_], thresholds: FloatArray) -> IntArray:
    """Returns the rows E1, E0, O1, O0 per group, in units of 1 / UNIT; a record adds exactly 2 UNIT to its column."""
    group = half_open(probabilities, thresholds)
    groups = len(thresholds) - 1
    likely = np.rint(probabilities * UNIT)
    observed = UNIT * positive.astype(np.float64)
    rows = [likely, UNIT - likely, observed, UNIT - observed]
    return np.stack([np.bincount(group, weights=row, minlength=groups) for row in rows]).astype(np.int64)


def statistic(sums: FloatArray) -> FloatArray:
    """Returns equation 6.5.1 over the last axis, for rows E1, E0, O1, O0; denominators are at least LEAST_EXPECTED."""
    expected, observed = sums[..., :2, :], sums[..., 2:, :]
    return np.asarray(((observed - expected) ** 2 / np.maximum(expected, LEAST_EXPECTED)).sum(axis=(-2, -1)))


@dataclass(frozen=True)
class PrivateHosmerLemeshow:
    """Noisy sums per group (rows E1, E0, O1, O0) and what follows from them."""

    thresholds: FloatArray
    sums: FloatArray
    scale: Fraction
    releases: tuple[CurveRelease, ...]

    @property
    def statistic(self) -> float:
        return float(statistic(self.sums))

    def chi_squared_p_value(self, fitted: bool = False) -> float:
        """Ignores the noise: Q degrees of freedom on data that the model was not fitted to, Q - 2 on its own.

        With noise the statistic is larger than chi-squared, so a small value proves nothing: see `p_value`.
        """
        groups = self.sums.shape[1]
        return float(chi2.sf(self.statistic, max(1, groups - 2 if fitted else groups)))

    def p_value(self, repeats: int = 1999, generator: np.random.Generator | None = None) -> float:
        """Compares with calibrated predictions under the noise of this release, by a parametric bootstrap
        (approximate).
        """
        chance = np.random.default_rng() if generator is None else generator
        likely, unlikely = np.maximum(self.sums[0], 0.0), np.maximum(self.sums[1], 0.0)
        sizes = np.rint(likely + unlikely).astype(np.int64)
        rates = likely / np.maximum(likely + unlikely, 1e-9)
        positives = chance.binomial(sizes, rates, size=(repeats, len(sizes))).astype(np.float64)
        truth = np.broadcast_to(np.stack([sizes * rates, sizes * (1 - rates)]), (repeats, 2, len(sizes)))
        clean = np.concatenate([truth, np.stack([positives, sizes - positives], axis=1)], axis=1)
        null = statistic(clean + chance.laplace(0.0, float(self.scale), clean.shape))
        return float((1 + np.sum(null >= self.statistic)) / (repeats + 1))


def sums_cost(adjacency: str) -> int:
    """Returns the L1 sensitivity of E1, E0, O1, O0 of all groups, given the groups."""
    return 2 if adjacency == "add_remove" else 4


def private_hosmer_lemeshow(
    probabilities: npt.ArrayLike,
    labels: npt.ArrayLike,
    epsilon: float,
    source: NoiseSource,
    groups: int = 10,
    levels: int = 10,
    adjacency: str = "replace_one",
    mechanism: str = "laplace",
    delta: float = 0.0,
) -> PrivateHosmerLemeshow:
    """Releases groups and sums, together (epsilon, delta)-DP.

    The budget is divided so that curve and sums have the same scale (half and half if the curve's noise is Gaussian).

    Args:
        probabilities: predicted probabilities of the positive class.
        labels: labels 0 and 1.
        epsilon: the epsilon of groups and sums together.
        source: the source of the noise.
        groups: the number of groups; quantiles that coincide leave fewer.
        levels: the curve of the predictions has 2^levels points.
        adjacency: `replace_one` or `add_remove`.
        mechanism: the mechanism of that curve, see `curve_mechanism`.
        delta: the delta of that curve.
    """
    if groups < 2:
        raise ValueError(f"{groups} groups make no test. HINT: use 10.")
    data = check_probabilities(probabilities)
    positive = check_labels(labels, data)
    cost = sums_cost(adjacency)
    curve_cost = curve_mechanism(mechanism, levels, epsilon, delta, adjacency).sensitivity
    share = 0.5 if delta else curve_cost / (curve_cost + cost)
    design = curve_mechanism(mechanism, levels, epsilon * share, delta, adjacency)
    curve = private_ecdf(data, Grid(0.0, 1.0, levels), design, source)
    thresholds = thresholds_of(curve.smoothed().fractions, curve.grid.edges, groups)
    rest = epsilon - design.epsilon
    scale = exact_scale(cost, rest)
    exact = group_sums(data, positive, thresholds)
    noise = discrete_laplace(source.stream(), exact.size, exact_scale(cost * UNIT, rest)).reshape(exact.shape)
    text = f"discrete Laplace of scale {float(scale):.6g} on 4 sums per half-open group, sensitivity {cost}"
    releases = ReleaseList()
    releases.record(design.booking("hosmer-lemeshow groups"))
    releases.record(CurveRelease("hosmer-lemeshow sums", text, rest, 0.0, adjacency))
    return PrivateHosmerLemeshow(thresholds, (exact + noise) / UNIT, scale, tuple(releases))


def thresholds_of(fractions: FloatArray, edges: FloatArray, groups: int) -> FloatArray:
    """Returns 0, the quantiles q / Q, and 1; quantiles that coincide leave fewer groups."""
    inner = {float(edges[crossing(fractions, q / groups) + 1]) for q in range(1, groups)}
    return np.array([0.0, *sorted(t for t in inner if 0 < t < 1), 1.0])
