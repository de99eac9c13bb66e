"""Releases a private empirical distribution function: F(tau_i) = #{x <= tau_i} / n at every point of a public grid."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lipdp_lightning.curves.cells import Grid
from lipdp_lightning.curves.discrete_noise import FloatArray, NoiseSource
from lipdp_lightning.curves.mechanism import CurveMechanism
from lipdp_lightning.curves.releases import CurveRelease
from lipdp_lightning.curves.smooth import smooth


@dataclass(frozen=True)
class PrivateECDF:
    """The released noisy counts at the grid's points, and post-processing of them.

    Theorem 6.3.1 of 004 in our terms: under replace-one, with n public, the counts are epsilon-DP with Laplace noise of
    scale L / epsilon on a binary tree of 2^L leaves; the expected squared error of F at a point is 2 (L + 1) L^2 / (n
    epsilon)^2 (the thesis: 2 (L + 1)^3 / (n epsilon)^2 with its 1 / n^2 left out). Under add/remove, where n is private
    too and the last count is as noisy as the others, the scale is ceil((L + 1) / 2) / epsilon.
    """

    grid: Grid
    mechanism: CurveMechanism
    counts: FloatArray

    @property
    def total(self) -> float:
        """The number of records n if it is public, else its noisy value, at least one."""
        return float(self.counts[-1]) if self.mechanism.total_public else max(float(self.counts[-1]), 1.0)

    @property
    def fractions(self) -> FloatArray:
        return self.counts / max(self.total, 1.0)

    def smoothed(self, p: int = 2, metric: str = "points") -> PrivateECDF:
        """Returns the non-decreasing curve in range, by post-processing; see `lipdp_lightning.curves.smooth`."""
        total = self.total if self.mechanism.total_public else None
        tree = self.mechanism.fan_outs if self.mechanism.name in ("laplace", "gaussian") else ()
        return replace(self, counts=smooth(self.counts, p, metric, tree, total))

    def evaluate(self, x: npt.ArrayLike) -> FloatArray:
        """Returns F at any x, which is its value at the last grid point not above x."""
        index = np.searchsorted(self.grid.points, np.asarray(x, dtype=np.float64), side="right")
        return np.concatenate([[0.0], self.fractions])[index]

    def booking(self, name: str = "ecdf") -> CurveRelease:
        return self.mechanism.booking(name)


def private_ecdf(
    values: npt.ArrayLike, grid: Grid, mechanism: CurveMechanism, source: NoiseSource, clamp: bool = False
) -> PrivateECDF:
    """Releases the counts of `values` on a public grid.

    Args:
        values: the private values.
        grid: the public grid; values outside its range are refused unless clamped.
        mechanism: how noise is added; its levels are those of the grid.
        source: the source of the noise.
        clamp: whether to move values outside the range to its ends. Clamping moves each value by itself, so it costs
            nothing; whether it happened must not be published.

    Returns:
        The noisy counts, with fractions, quantiles and smoothing as post-processing.

    Raises:
        ValueError: if a value is not finite or lies outside the range, or if there are no values under a public total.

    Example:
        >>> mechanism = curve_mechanism("laplace", levels=10, epsilon=1.0)
        >>> curve = private_ecdf(ages, Grid(0, 120, 10), mechanism, NoiseSource())
        >>> curve.smoothed().evaluate(65)  # the noisy share of ages up to 65
    """
    assert mechanism.curves == 1 and mechanism.levels == grid.levels
    histogram = grid.histogram(values, clamp)
    if mechanism.total_public and not histogram.any():
        raise ValueError("there are no values. HINT: check the column and the file.")
    return PrivateECDF(grid, mechanism, mechanism.release(histogram, source))
