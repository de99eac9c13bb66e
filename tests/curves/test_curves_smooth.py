"""Smoothing against dense solvers of the same problems."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize import LinearConstraint, linprog, minimize

from lipdp_lightning.curves.mechanism import curve_mechanism
from lipdp_lightning.curves.smooth import isotonic_l1, isotonic_l2, smooth, tree_l1, tree_l1_program, tree_l2
from lipdp_lightning.curves.tree import noise_matrix


def noisy(points: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.cumsum(generator.poisson(2, points)) + generator.normal(0, 6, points)


def differences(points: int) -> np.ndarray:
    return np.eye(points)[1:] - np.eye(points)[:-1]


@pytest.mark.parametrize("seed", range(8))
def test_absolute_deviations_are_least(seed: int) -> None:
    values = noisy(17, seed)
    fitted = isotonic_l1(values)
    assert np.all(np.diff(fitted) >= 0)
    n = len(values)
    step, one, none = differences(n), np.eye(n), np.zeros((n - 1, n))
    rows = np.block([[one, -one], [-one, -one], [-step, none]])
    limits = np.concatenate([values, -values, np.zeros(n - 1)])
    best = linprog(np.r_[np.zeros(n), np.ones(n)], A_ub=rows, b_ub=limits, bounds=(None, None)).fun
    assert np.abs(fitted - values).sum() == pytest.approx(best, abs=1e-7)
    assert np.abs(isotonic_l2(values) - values).sum() > best - 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_clipping_the_monotone_fit_solves_the_problem_with_a_range(seed: int) -> None:
    values, upper = noisy(12, seed), 15.0
    fitted = np.clip(isotonic_l2(values), 0, upper)
    result = minimize(
        lambda g: ((g - values) ** 2).sum(), np.linspace(0, upper, 12), jac=lambda g: 2 * (g - values),
        bounds=[(0, upper)] * 12, constraints=[LinearConstraint(differences(12), 0, np.inf)], method="SLSQP",
        options={"ftol": 1e-13, "maxiter": 500},
    )  # fmt: skip
    assert fitted == pytest.approx(result.x, abs=1e-4)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fan_outs", [(2, 2, 2), (3, 3)])
def test_least_squares_in_the_noises_of_the_tree(seed: int, fan_outs: tuple[int, ...]) -> None:
    matrix = noise_matrix(fan_outs)
    points = matrix.shape[0] - 1  # the last point is known
    rows = matrix[:points]
    values, upper = noisy(points, seed), 14.0
    fitted = tree_l2(values, fan_outs, upper)
    inverse = np.linalg.inv(rows @ rows.T)
    result = minimize(
        lambda g: (g - values) @ inverse @ (g - values), np.linspace(0, upper, points),
        jac=lambda g: 2 * inverse @ (g - values), bounds=[(0, upper)] * points,
        constraints=[LinearConstraint(differences(points), 0, np.inf)], method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )  # fmt: skip
    assert fitted == pytest.approx(result.x, abs=2e-4)
    assert (fitted - values) @ inverse @ (fitted - values) <= result.fun * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("solver", [tree_l1, tree_l1_program])
@pytest.mark.parametrize("seed", range(4))
def test_least_absolute_noises_of_the_tree(seed: int, solver: Callable[..., np.ndarray]) -> None:
    matrix = noise_matrix((2, 2, 2))[:7]
    values, upper = noisy(7, seed), 14.0
    fitted = solver(values, (2, 2, 2), upper)
    assert np.all(np.diff(fitted) >= 0) and fitted[0] >= 0 and fitted[-1] <= upper

    def cost(curve: np.ndarray) -> float:
        both = np.hstack([matrix, -matrix])
        return float(linprog(np.ones(both.shape[1]), A_eq=both, b_eq=curve - values, bounds=(0, None)).fun)

    nodes = matrix.shape[1]
    both = np.hstack([matrix, -matrix])
    rows = np.vstack([-differences(7) @ both, -both[:1], both[-1:]])
    limits = np.concatenate([np.diff(values), values[:1], upper - values[-1:]])
    best = linprog(np.ones(2 * nodes), A_ub=rows, b_ub=limits, bounds=(0, None)).fun
    assert cost(fitted) == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("metric, p", [("points", 1), ("points", 2), ("tree", 1), ("tree", 2)])
def test_a_curve_in_range_is_left_alone_and_a_noisy_one_improves(metric: str, p: int) -> None:
    truth = np.cumsum(np.arange(1, 65) % 4).astype(float)
    tree = (2,) * 6
    assert smooth(truth, p, metric, tree, truth[-1]) == pytest.approx(truth, abs=1e-4)
    mechanism = curve_mechanism("laplace", 6, 0.3)
    noise = mechanism.simulate(np.random.default_rng(1), 30)
    fitted = np.array([smooth(truth + row, p, metric, tree, truth[-1]) for row in noise])
    assert np.all(np.diff(fitted, axis=1) >= 0) and fitted.min() >= 0 and fitted.max() <= truth[-1]
    assert np.mean((fitted - truth) ** 2) < 0.6 * np.mean(noise**2)


def test_pooling_moves_nothing_further_from_a_monotone_truth() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        truth = np.sort(generator.normal(size=30))
        noise = generator.normal(size=30)
        fitted = isotonic_l2(truth + noise)
        assert np.max(np.abs(fitted - truth)) <= np.max(np.abs(noise)) + 1e-12


@pytest.mark.parametrize("metric", ["points", "tree"])
@pytest.mark.parametrize("p", [1, 2])
def test_thirty_thousand_points_in_under_a_second(metric: str, p: int) -> None:
    """In processor time of one core: other processes do not count."""
    values = noisy((1 << 15) - 1, 0)
    fan_outs = (2,) * 15
    smooth(values[:255], p, metric, (2,) * 8, 600.0)  # loads what is loaded once
    start = time.process_time()
    fitted = smooth(np.append(values, 70_000.0), p, metric, fan_outs, 70_000.0)
    assert time.process_time() - start < 1.0
    assert np.all(np.diff(fitted) >= 0) and fitted[0] >= 0 and fitted[-1] == 70_000.0


def test_a_metric_that_does_not_apply_is_refused() -> None:
    with pytest.raises(ValueError, match="tree"):
        smooth(np.arange(4.0), 2, "tree")
    with pytest.raises(ValueError, match="p 3"):
        smooth(np.arange(4.0), 3)
