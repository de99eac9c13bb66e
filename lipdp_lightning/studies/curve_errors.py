"""Measures errors and running times of the mechanisms, for docs/curves.md.

The data set is the thesis's (6.6.2 a): every cell of the grid holds a Poisson number of records.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from lipdp_lightning.curves.cells import Grid
from lipdp_lightning.curves.discrete_noise import FloatArray, NoiseSource
from lipdp_lightning.curves.mechanism import CurveMechanism, curve_mechanism
from lipdp_lightning.curves.smooth import smooth


def poisson_values(levels: int, mean: float, seed: int = 0) -> FloatArray:
    """Returns values on the points of Grid(0, 1, levels)."""
    counts = np.random.default_rng(seed).poisson(mean, 1 << levels)
    return np.repeat(Grid(0.0, 1.0, levels).points, counts)


@dataclass(frozen=True)
class ErrorRow:
    """The mean squared error of F over the points, times n^2: measured, and from the mechanism's formula."""

    mechanism: str
    delta: float
    adjacency: str
    measured: float
    formula: float
    thesis: float


def thesis_error(levels: int, epsilon: float) -> float:
    """Returns n^2 times the error of theorem 6.3.1: 2 (L + 1)^3 / epsilon^2, under replace-one."""
    return 2 * (levels + 1) ** 3 / epsilon**2


def measured_error(mechanism: CurveMechanism, repeats: int, source: NoiseSource | None = None) -> float:
    """Returns the mean squared error of whole releases of the Poisson data set, with the noise of real ones."""
    grid = Grid(0.0, 1.0, mechanism.levels)
    histogram = grid.histogram(poisson_values(mechanism.levels, 3.0))
    truth = np.cumsum(histogram)
    noise_source = NoiseSource() if source is None else source
    last = -1 if mechanism.total_public else mechanism.size
    releases = (mechanism.release(histogram, noise_source) - truth for _ in range(repeats))
    return float(np.mean([np.mean(error[:last] ** 2) for error in releases]))


def compare_errors(levels: int, epsilon: float, delta: float, repeats: int) -> list[ErrorRow]:
    """Compares all mechanisms under both relations at one epsilon; delta is for those that need one."""
    rows = []
    for adjacency in ("replace_one", "add_remove"):
        for name, chosen in (("laplace", 0.0), ("factorization", 0.0), ("gaussian", delta), ("factorization", delta)):
            mechanism = curve_mechanism(name, levels, epsilon, chosen, adjacency)
            last = -1 if mechanism.total_public else mechanism.size
            formula = float(np.mean(mechanism.variances()[:last]))
            measured = measured_error(mechanism, repeats)
            rows.append(ErrorRow(name, chosen, adjacency, measured, formula, thesis_error(levels, epsilon)))
    return rows


@dataclass(frozen=True)
class SmoothingRow:
    """Mean processor seconds of one smoothing, and the squared error after it as a share of that before."""

    levels: int
    p: int
    metric: str
    seconds: float
    error_ratio: float


def compare_smoothing(levels: int, epsilon: float, repeats: int = 20) -> list[SmoothingRow]:
    """Compares every way to smooth releases of the Poisson data set."""
    mechanism = curve_mechanism("laplace", levels, epsilon)
    histogram = Grid(0.0, 1.0, levels).histogram(poisson_values(levels, 3.0))
    truth = np.cumsum(histogram).astype(np.float64)
    source = NoiseSource()
    releases = [mechanism.release(histogram, source) for _ in range(repeats)]
    before = [float(np.mean((counts - truth) ** 2)) for counts in releases]
    rows = []
    for metric in ("points", "tree"):
        for p in (2, 1):
            start = time.process_time()
            smoothed = [smooth(counts, p, metric, mechanism.fan_outs, float(truth[-1])) for counts in releases]
            seconds = (time.process_time() - start) / repeats
            after = [float(np.mean((curve - truth) ** 2)) for curve in smoothed]
            ratio = float(np.mean(np.array(after) / np.array(before)))
            rows.append(SmoothingRow(levels, p, metric, seconds, ratio))
    return rows
