"""Computes confidence bounds of an audit: from counts of errors to lower bounds on epsilon.

Every bound here fails with probability at most its ``alpha``. A caller that makes several splits one alpha over them
(:func:`shares`), so that a whole suite of a correct program raises an alarm with probability at most the suite's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from ..accounting.privacy_curves import ADD, REMOVE, PldCurve

_LARGEST_MULTIPLIER = 1e4


def shares(alpha: float, parts: int) -> float:
    """Returns the Bonferroni level of each of ``parts`` tests that together raise a false alarm with
    probability alpha.
    """
    return alpha / max(1, parts)


def proportion_upper(successes: int, trials: int, alpha: float) -> float:
    """Returns the Clopper-Pearson bound, which exceeds the true proportion with probability at least 1 - alpha."""
    return 1.0 if successes >= trials else float(stats.beta.ppf(1 - alpha, successes + 1, trials - successes))


def proportion_lower(successes: int, trials: int, alpha: float) -> float:
    return 1.0 - proportion_upper(trials - successes, trials, alpha)


def deviation_bounds(sum_of_squares: float, count: int, alpha: float) -> tuple[float, float]:
    """Returns lower and upper bounds on the standard deviation of centred normals, each failing with alpha / 2."""
    lower = sum_of_squares / stats.chi2.isf(alpha / 2, count)
    upper = sum_of_squares / stats.chi2.ppf(alpha / 2, count)
    return math.sqrt(float(lower)), math.sqrt(float(upper))


@dataclass(frozen=True)
class ErrorBounds:
    """Upper confidence bounds on a distinguisher's two errors, which hold together with probability 1 - alpha."""

    false_positive: float
    false_negative: float
    alpha: float


def error_bounds(without: Sequence[float], with_canary: Sequence[float], threshold: float, alpha: float) -> ErrorBounds:
    """Bounds the errors of saying "inserted" where the score exceeds a threshold that was fixed before seeing the
    scores.
    """
    absent, present = np.asarray(without), np.asarray(with_canary)
    false_positive = proportion_upper(int((absent > threshold).sum()), len(absent), alpha / 2)
    false_negative = proportion_upper(int((present <= threshold).sum()), len(present), alpha / 2)
    return ErrorBounds(false_positive, false_negative, alpha)


# ---- what errors imply


def epsilon_from_errors(errors: ErrorBounds, delta: float) -> float:
    """Returns the (epsilon, delta) form: 1 - beta <= e^eps alpha + delta, also with the two errors exchanged."""

    def one_side(first: float, second: float) -> float:
        return math.log((1 - delta - second) / first) if first > 0 and 1 - delta - second > 0 else 0.0

    pair = errors.false_positive, errors.false_negative
    return max(0.0, one_side(*pair), one_side(*pair[::-1]))


def mu_from_errors(errors: ErrorBounds) -> float:
    """Returns the GDP form (Dong, Roth, Su 2022): a mu-GDP mechanism has Phi^-1(1 - alpha) - Phi^-1(beta) <= mu."""
    return max(0.0, float(stats.norm.isf(errors.false_positive) - stats.norm.ppf(errors.false_negative)))


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Returns delta(epsilon) of the Gaussian mechanism with sensitivity over deviation mu (Balle and Wang 2018)."""
    if mu <= 0:
        return 0.0
    first = stats.norm.cdf(mu / 2 - epsilon / mu)
    second = math.exp(epsilon + float(stats.norm.logcdf(-mu / 2 - epsilon / mu)))
    return max(0.0, float(first) - second)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Returns the smallest epsilon with gaussian_delta(mu, epsilon) <= delta, to 1e-9, rounded down."""
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while gaussian_delta(mu, high) > delta:
        low, high = high, 2 * high
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(mu, middle) > delta else (low, middle)
    return low


def multiplier_not_refuted(errors: ErrorBounds, sample_rate: float, steps: int) -> float:
    """Returns the largest noise multiplier whose subsampled composition allows these errors (the f-DP form).

    A multiplier is refuted where TPR > e^eps FPR + delta(eps) for some eps, in either direction of add/remove, with
    delta(eps) an upper bound on the composition's curve. At any delta, epsilon of the returned multiplier is a lower
    bound for whatever subsampled Gaussian composition produced the scores. It is infinite if nothing is refuted.
    """
    if sample_rate == 1:
        mu = mu_from_errors(errors)
        return math.sqrt(steps) / mu if mu > 0 else math.inf
    epsilons = np.concatenate([np.linspace(0, 1, 41), np.geomspace(1.05, 30, 60)])

    def refuted(multiplier: float) -> bool:
        release = [(multiplier, sample_rate, steps)]
        pairs = (
            (1 - errors.false_negative, errors.false_positive, REMOVE),
            (1 - errors.false_positive, errors.false_negative, ADD),
        )
        for seen, small, direction in pairs:
            curve = PldCurve(release, direction)
            if any(seen > math.exp(e) * small + curve.delta_at(float(e)) for e in epsilons):
                return True
        return False

    low, high = 0.05, 1.0  # low is not refuted, high is
    while not refuted(high):
        low, high = high, 2 * high
        if high > _LARGEST_MULTIPLIER:
            return math.inf
    while high / low > 1.002:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return high


def best_threshold(mu: float, trials: int, delta: float, alpha: float) -> float:
    """Returns where to cut N(0, 1) from N(mu, 1), so that this many trials are expected to prove the largest epsilon.

    The threshold depends on the claim alone, so that it spends no look at the scores.
    """
    candidates = np.linspace(mu / 2, mu / 2 + 4.0, 81)
    best, proved = float(candidates[0]), -1.0
    for threshold in candidates:
        counts = (stats.norm.sf(threshold) * trials, stats.norm.cdf(threshold - mu) * trials)
        bounds = [proportion_upper(math.ceil(c), trials, alpha / 2) for c in counts]
        epsilon = epsilon_from_errors(ErrorBounds(bounds[0], bounds[1], alpha), delta)
        if epsilon > proved:
            best, proved = float(threshold), epsilon
    return best


# ---- one run (Steinke, Nasr, Jagielski 2023)


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Bounds the probability that an (epsilon, delta)-DP run lets this many guesses be correct (Theorem 5.2 of the
    paper).

    Each of ``canaries`` was included by a fair coin, ``guesses`` of them were guessed and ``correct`` of those rightly.
    For delta = 0 the number of correct guesses is dominated by Bin(guesses, e^eps / (1 + e^eps)); delta adds 2 m delta
    max_i P[correct - i <= Bin < correct] / i.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"{correct} of {guesses} guesses on {canaries} canaries are not a possible outcome. "
            "HINT: correct <= guesses <= canaries."
        )
    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(correct - 1, guesses, chance))
    below = stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, chance).cumsum()
    steepest = float((below / np.arange(1, correct + 1)).max()) if correct else 0.0
    return min(1.0, tail + 2 * canaries * delta * steepest)


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, alpha: float) -> float:
    """Returns the largest epsilon that is refuted at level alpha; 0 if not even epsilon = 0 is refuted."""
    if one_run_p_value(canaries, guesses, correct, 0.0, delta) > alpha:
        return 0.0
    low, high = 0.0, 1.0
    while one_run_p_value(canaries, guesses, correct, high, delta) <= alpha and high < 64:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        refuted = one_run_p_value(canaries, guesses, correct, middle, delta) <= alpha
        low, high = (middle, high) if refuted else (low, middle)
    return low


def best_guesses(mu: float, canaries: int, delta: float, alpha: float) -> int:
    """Returns how many canaries to guess, half "in" and half "out", from the claim alone: scores N(0, 1) or
    N(mu, 1).
    """
    best, proved = 2, -1.0
    for share in np.geomspace(0.02, 1.0, 25):
        guesses = max(2, 2 * int(share * canaries / 2))
        tail = guesses / canaries / 2  # share of the mixture on each side
        low, high = -10.0, 10.0 + mu
        for _ in range(60):
            middle = (low + high) / 2
            mass = (stats.norm.sf(middle) + stats.norm.sf(middle - mu)) / 2
            low, high = (middle, high) if mass > tail else (low, middle)
        right = float(stats.norm.sf(low - mu) / (2 * tail))
        epsilon = one_run_epsilon(canaries, guesses, math.floor(min(1.0, right) * guesses), delta, alpha)
        if epsilon > proved:
            best, proved = guesses, epsilon
    return best
