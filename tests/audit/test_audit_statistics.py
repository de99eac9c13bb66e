"""Confidence bounds of the audit: they fail as seldom as they say, and are not much wider than they need to be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from lipdp_lightning.audit.confidence import (
    ErrorBounds,
    best_guesses,
    deviation_bounds,
    epsilon_from_errors,
    error_bounds,
    gaussian_delta,
    gaussian_epsilon,
    mu_from_errors,
    multiplier_not_refuted,
    one_run_epsilon,
    one_run_p_value,
    proportion_lower,
    proportion_upper,
)
from lipdp_lightning.audit.noise_checks import direction_p_value, variance_p_value
from lipdp_lightning.audit.sampling_checks import dispersion_p_value, overlap_p_value
from lipdp_lightning.budget.calibrate import privacy_bound


def test_clopper_pearson_covers_in_every_case_of_thirty_trials() -> None:
    """Exact coverage, summed over outcomes."""
    for truth in np.linspace(0.02, 0.98, 25):
        mass = stats.binom.pmf(np.arange(31), 30, truth)
        missed = sum(m for k, m in enumerate(mass) if proportion_upper(k, 30, 0.05) < truth)
        assert missed <= 0.05
        missed = sum(m for k, m in enumerate(mass) if proportion_lower(k, 30, 0.05) > truth)
        assert missed <= 0.05
    # a normal interval does not
    wrong = [k / 30 + 1.645 * math.sqrt(k / 30 * (1 - k / 30) / 30) for k in range(31)]
    assert sum(m for k, m in enumerate(stats.binom.pmf(np.arange(31), 30, 0.05)) if wrong[k] < 0.05) > 0.05


def test_the_gaussian_curve_agrees_with_the_accountant_and_with_the_errors_of_its_own_test() -> None:
    for mu in (0.3, 1.0, 3.0):
        epsilon = gaussian_epsilon(mu, 1e-5)
        assert gaussian_delta(mu, epsilon) == pytest.approx(1e-5, rel=1e-4)
        assert privacy_bound(1 / mu, 1e-5, 1.0, 1, "pld").epsilon == pytest.approx(epsilon, rel=2e-3)
        exact = ErrorBounds(float(stats.norm.sf(mu / 2)), float(stats.norm.sf(mu / 2)), 0.0)
        assert mu_from_errors(exact) == pytest.approx(mu)
        assert epsilon_from_errors(exact, 1e-5) < gaussian_epsilon(mu, 1e-5)


def test_lower_bounds_of_many_audits_of_a_true_claim_fail_as_seldom_as_they_say() -> None:
    generator = np.random.default_rng(0)
    alpha, claimed, failed = 0.1, 1.0, 0
    for _ in range(300):
        errors = error_bounds(generator.normal(0, 1, 200), generator.normal(claimed, 1, 200), claimed / 2, alpha)
        failed += mu_from_errors(errors) > claimed
    assert failed <= stats.binom.ppf(0.999, 300, alpha)
    # and a false claim is refuted
    errors = error_bounds(generator.normal(0, 1, 2000), generator.normal(1.5, 1, 2000), 0.5, 1e-4)
    assert mu_from_errors(errors) > claimed


@pytest.mark.slow
def test_errors_of_a_subsampled_composition_do_not_refute_it_and_refute_half_the_noise() -> None:
    """The claimed composition's exact errors, by simulation of its privacy loss with 40,000 runs."""
    generator, sigma, rate, steps, runs = np.random.default_rng(1), 1.0, 0.2, 20, 40_000
    scores = []
    for inserted in (False, True):
        total = np.zeros(runs)
        for _ in range(steps):
            z = generator.normal(size=runs) + inserted * (generator.random(runs) < rate) / sigma
            total += np.log1p(rate * np.expm1(z / sigma - 0.5 / sigma**2))
        scores.append(total)
    errors = error_bounds(scores[0], scores[1], 0.1, 1e-3)
    found = multiplier_not_refuted(errors, rate, steps)
    assert sigma <= found < 1.15 * sigma
    broken = multiplier_not_refuted(error_bounds(scores[0], 2 * scores[1], 0.1, 1e-3), rate, steps)
    assert broken <= found
    mu = multiplier_not_refuted(ErrorBounds(0.3, 0.3, 0.0), 1.0, 4)
    assert mu == pytest.approx(2 / mu_from_errors(ErrorBounds(0.3, 0.3, 0.0)))


def test_guesses_on_randomised_responses_are_covered_and_tight() -> None:
    """epsilon-DP on every coin: guesses are right with probability e^eps / (1 + e^eps), exactly the bound's law."""
    generator, epsilon = np.random.default_rng(2), 1.0
    right = generator.binomial(400, math.exp(epsilon) / (1 + math.exp(epsilon)), 2000)
    bounds = np.array([one_run_epsilon(400, 400, int(k), 0.0, 0.05) for k in np.unique(right)])
    lower = dict(zip(np.unique(right).tolist(), bounds.tolist(), strict=True))
    share = np.mean([lower[int(k)] > epsilon for k in right])
    assert share <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)
    assert np.mean([lower[int(k)] for k in right]) > 0.75 * epsilon
    # with 60 % more right guesses than that, epsilon = 1 is refuted
    assert one_run_epsilon(400, 400, 340, 0.0, 0.001) > epsilon


def test_delta_lets_whole_data_sets_be_published_sometimes() -> None:
    """A mechanism that publishes all coins with probability delta m is (0, delta m)-DP: the bound must allow for it."""
    assert one_run_p_value(100, 100, 100, 0.0, 1e-3) >= 1e-3
    assert one_run_p_value(100, 100, 100, 0.0, 0.0) < 1e-29
    assert one_run_p_value(100, 50, 0, 5.0, 0.0) == 1.0
    with pytest.raises(ValueError, match="HINT"):
        one_run_p_value(10, 20, 5, 1.0, 0.0)
    assert 2 <= best_guesses(2.0, 500, 1e-9, 1e-4) <= 500


def test_p_values_of_true_hypotheses_are_uniform_enough() -> None:
    """At 5 % about one in twenty of true hypotheses is rejected: neither many more nor none at all."""
    import torch

    generator = np.random.default_rng(3)
    torch.manual_seed(3)
    p_values: dict[str, list[float]] = {"direction": [], "variance": [], "dispersion": [], "overlap": []}
    for _ in range(150):
        p_values["direction"].append(direction_p_value(torch.randn(50), torch.randn(50)))
        p_values["variance"].append(variance_p_value(float(np.square(generator.normal(size=40)).sum()), 40))
        p_values["dispersion"].append(dispersion_p_value(generator.binomial(60, 0.1, 100).astype(float), 60, 0.1))
        samples = [torch.from_numpy((generator.random(200) < 0.2).nonzero()[0]) for _ in range(6)]
        p_values["overlap"].append(overlap_p_value(samples, 200))
    for name, values in p_values.items():
        rejected = int((np.array(values) < 0.05).sum())
        assert stats.binomtest(rejected, 150, 0.05).pvalue > 1e-4, (name, rejected)
    low, high = deviation_bounds(100.0 * 4, 100, 0.01)
    assert low < 2 < high < 3
