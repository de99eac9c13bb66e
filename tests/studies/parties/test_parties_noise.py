"""What the noise must undo, by linear programming, and the law and the names of the noise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import chi2

from lipdp_lightning.studies.parties import Histogram, ThresholdCounts, VectorSum
from lipdp_lightning.studies.parties.kernel_sums import UStatistic
from lipdp_lightning.studies.parties.server_noise import NamedNoise, noise_scale


class Probe:
    """A noise source whose variable number k is 1 and all others 0."""

    def __init__(self) -> None:
        self.names: list[tuple[int, int]] = []
        self.one = -1

    def at(self, groups: np.ndarray, indices: np.ndarray) -> np.ndarray:
        out = np.zeros(indices.shape, dtype=np.int64)
        for place in np.ndindex(indices.shape):
            name = (int(groups[place]), int(indices[place]))
            if name not in self.names:
                self.names.append(name)
            out[place] = self.names.index(name) == self.one
        return out


def matrix(statistic: UStatistic) -> np.ndarray:
    """A of noise = A eta, coordinates by variables."""
    probe = Probe()
    statistic.noise(probe)  # type: ignore[arg-type]
    columns = []
    for number in range(len(probe.names)):
        probe.one = number
        columns.append(statistic.noise(probe))  # type: ignore[arg-type]
    return np.stack(columns, axis=1)


def least_norm(a: np.ndarray, difference: np.ndarray) -> float:
    """min ||x||_1 subject to A x = difference."""
    solved = linprog(np.ones(2 * a.shape[1]), A_eq=np.hstack([a, -a]), b_eq=difference)
    assert solved.status == 0
    return float(solved.fun)


def worst_neighbour(statistic: UStatistic, records: np.ndarray) -> float:
    a, values = matrix(statistic), statistic.contributions(records)
    differences = {tuple(p - q) for p, q in itertools.product(values, repeat=2)}
    return max(least_norm(a, np.array(d)) for d in differences)


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
def test_cost_of_threshold_counts_is_the_least_that_is_sound(levels: int) -> None:
    statistic = ThresholdCounts(levels, tuple(range(1 << levels)))
    records = np.array(list(itertools.product(range(1 << levels), (0, 1))))
    assert worst_neighbour(statistic, records) == pytest.approx(statistic.cost)
    assert statistic.cost == levels


def test_noise_on_the_points_alone_would_cost_more() -> None:
    """The check sees a wrong noise: independent noise per threshold needs cost 2^levels - 1, not levels."""

    class PerPoint(ThresholdCounts):
        def noise(self, source):
            points = np.asarray(self.thresholds)
            return source.at(np.zeros_like(points), points)

    statistic = PerPoint(3, tuple(range(8)))
    records = np.array([[x, 1] for x in range(8)])
    assert worst_neighbour(statistic, records) == pytest.approx(7) and statistic.cost == 3


def test_cost_of_histograms_and_sums() -> None:
    assert worst_neighbour(Histogram(2), np.arange(4)[:, None]) == pytest.approx(Histogram(2).cost)
    corners = 3 * np.vstack([np.eye(2, dtype=int), -np.eye(2, dtype=int)])
    assert worst_neighbour(VectorSum(2, 3), corners) == pytest.approx(VectorSum(2, 3).cost)


def test_one_name_is_one_variable_and_sessions_differ() -> None:
    scale = noise_scale(8, 0.01)
    statistic = ThresholdCounts(8, tuple(range(256)))
    source = NamedNoise(bytes(16), b"session", scale)
    everything = statistic.noise(source)
    assert np.array_equal(statistic.at((255, 3, 3)).noise(source), everything[[255, 3, 3]])
    for secret, session in ((bytes(16), b"another"), (bytes(15) + b"1", b"session")):
        other = statistic.noise(NamedNoise(secret, session, scale))
        assert np.mean(other == everything) < 0.05


def test_old_noise_under_new_data_gives_the_difference_away() -> None:
    """Why a session has its own noise: with the same, two releases differ by exactly the difference of the sums."""
    statistic = ThresholdCounts(4, (3, 9))
    old, new = (statistic.contributions(np.array([[x, 1]])).sum(axis=0) for x in (2, 12))
    scale = noise_scale(4, 0.1)

    def release(values: np.ndarray, session: bytes) -> np.ndarray:
        return values + statistic.noise(NamedNoise(bytes(16), session, scale))

    assert np.array_equal(release(new, b"s") - release(old, b"s"), new - old)
    assert not np.array_equal(release(new, b"t") - release(old, b"s"), new - old)


def test_law() -> None:
    """Chi-square of 40,000 variables against the discrete Laplace law of scale cost / epsilon."""
    scale = noise_scale(3, 1.5)
    assert scale >= 2 and float(scale) == pytest.approx(2, rel=1e-5)
    groups = np.zeros(40_000, dtype=np.int64)
    drawn = NamedNoise(bytes(16), b"law", scale).at(groups, np.arange(40_000))
    p = math.exp(-1 / 2)
    edge = 12
    counts = np.bincount(np.clip(drawn, -edge, edge) + edge, minlength=2 * edge + 1)
    law = np.array([(1 - p) / (1 + p) * p ** abs(k) for k in range(-edge, edge + 1)])
    law[[0, -1]] = p**edge / (1 + p)
    statistic = float(((counts - 40_000 * law) ** 2 / (40_000 * law)).sum())
    assert statistic < chi2.isf(1e-6, 2 * edge)
    wrong = np.roll(law, 1)
    assert float(((counts - 40_000 * wrong) ** 2 / (40_000 * wrong)).sum()) > chi2.isf(1e-6, 2 * edge)
