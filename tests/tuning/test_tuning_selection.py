"""Private selection: the distribution of the number of trials, and its price against exact divergences."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lipdp_lightning.accounting.accountants import epsilon_of
from lipdp_lightning.accounting.events import GAUSSIAN, SUBSAMPLED_GAUSSIAN, LedgerEntry
from lipdp_lightning.key_streams import CounterStream
from lipdp_lightning.privacy.keys import derive_key
from lipdp_lightning.tuning.selection import TrialCount, score_entry, selected_divergences, selection_epsilon

ETAS = (-0.5, 0.0, 0.5, 1.0, 3.0)
ORDERS = np.array([1.05, 1.5, 2.0, 4.0, 8.0, 32.0, 256.0, 1024.0])
Generating = Callable[[np.ndarray], np.ndarray]


def generating(count: TrialCount) -> Generating:
    """E[x^K] in closed form, independent of the recursion."""
    if count.eta == 0:
        return lambda x: np.log1p(-(1 - count.gamma) * x) / math.log(count.gamma)
    return lambda x: ((1 - (1 - count.gamma) * x) ** -count.eta - 1) / (count.gamma**-count.eta - 1)


@pytest.mark.parametrize("mean", [1.5, 4.0, 30.0])
@pytest.mark.parametrize("eta", ETAS)
def test_probabilities_sum_to_one_and_have_the_mean(eta: float, mean: float) -> None:
    count = TrialCount.with_mean(eta, mean)
    p = count.probabilities(200_000)
    k = np.arange(1, len(p) + 1)
    assert p.sum() == pytest.approx(1, rel=1e-9)
    assert (k * p).sum() == pytest.approx(mean, rel=1e-6) and mean <= count.mean() <= mean * (1 + 1e-9)
    for x in (0.1, 0.7, 0.99):
        assert (p * x**k).sum() == pytest.approx(float(generating(count)(np.array(x))), rel=1e-9)


@pytest.mark.parametrize("eta", ETAS)
def test_draws_have_the_distribution(eta: float) -> None:
    count, draws = TrialCount.with_mean(eta, 5.0), 20_000
    stream = CounterStream(derive_key(b"s" * 16, "test"))
    drawn = np.array([count.draw(stream) for _ in range(draws)])
    expected = count.probabilities(7) * draws
    for k in range(1, 8):
        assert abs((drawn == k).sum() - expected[k - 1]) < 5 * math.sqrt(expected[k - 1])
    assert drawn.min() == 1


def renyi(p: np.ndarray, q: np.ndarray, order: float) -> float:
    with np.errstate(divide="ignore"):
        terms = order * np.log(p) - (order - 1) * np.log(q)
    largest = terms.max()
    return float((largest + math.log(np.exp(terms - largest).sum())) / (order - 1))


def divergences(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.array([max(renyi(p, q, a), renyi(q, p, a), 0.0) for a in ORDERS])


def best_of(p: np.ndarray, generate: Generating) -> np.ndarray:
    """The exact distribution of the best (largest) of K outputs: P[best <= y] = E[P[output <= y]^K]."""
    return np.diff(generate(np.minimum(np.cumsum(p), 1.0)), prepend=0.0)


def neighbours(weights: list[float], tilts: list[float]) -> tuple[np.ndarray, np.ndarray]:
    p = np.array(weights) / sum(weights)
    q = p * np.exp(np.array(tilts[: len(p)]))
    return p, q / q.sum()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=5), st.lists(st.floats(-2, 2), min_size=5, max_size=5),
    st.sampled_from(ETAS), st.floats(1.2, 40.0),
)  # fmt: skip
def test_the_bound_holds_for_exact_divergences(
    weights: list[float], tilts: list[float], eta: float, mean: float
) -> None:
    count = TrialCount.with_mean(eta, mean)
    p, q = neighbours(weights, tilts)
    true = divergences(best_of(p, generating(count)), best_of(q, generating(count)))
    assert (true <= selected_divergences(ORDERS, divergences(p, q), count) * (1 + 1e-9) + 1e-9).all()


def test_without_its_price_the_bound_is_false() -> None:
    count = TrialCount.with_mean(1.0, 20.0)
    p, q = neighbours([0.5, 0.5], [-1.0, 1.0])
    true, one = divergences(best_of(p, generating(count)), best_of(q, generating(count))), divergences(p, q)
    assert (true > one * 1.1).any()


def test_a_fixed_number_of_trials_is_not_covered() -> None:
    """Ten trials, always: the bound of a geometric number with the same mean does not hold."""
    count = TrialCount.with_mean(1.0, 10.0)
    p, q = neighbours([0.5, 0.5], [-0.3, 0.3])
    true = divergences(best_of(p, lambda x: x**10), best_of(q, lambda x: x**10))
    assert (true > selected_divergences(ORDERS, divergences(p, q), count) * 1.1).any()


def test_epsilon_is_that_of_the_worst_trial_with_its_price() -> None:
    steps = [LedgerEntry(SUBSAMPLED_GAUSSIAN, sigma, 0.02, 500, "gradient") for sigma in (1.0, 1.5)]
    count = TrialCount.with_mean(0.0, 10.0)
    alone = [epsilon_of("rdp", [s], 1e-5).epsilon for s in steps]
    selected = [selection_epsilon([[s]], count, 1e-5) for s in steps]
    assert selected[0] > alone[0] > alone[1] and selected[1] > alone[1]
    assert selection_epsilon([[steps[0]], [steps[1]]], count, 1e-5) == pytest.approx(selected[0])
    assert selection_epsilon([[steps[1], score_entry(5.0)]], count, 1e-5) > selected[1]
    assert selection_epsilon([[LedgerEntry(GAUSSIAN, 0.0, 1.0, 1, "none")]], count, 1e-5) == math.inf
    more = TrialCount.with_mean(0.0, 100.0)
    assert selection_epsilon([[steps[0]]], more, 1e-5) > selected[0]


def test_one_gaussian_by_hand() -> None:
    """a / (2 s^2) for training, and the theorem's terms written out once more."""
    count, sigma, delta = TrialCount(1.0, 0.1), 8.0, 1e-6

    def price(a: float) -> float:
        b = np.arange(1.01, 400, 0.01)
        second = float((2 * (1 - 1 / b) * b / (2 * sigma**2) + 2 * math.log(10) / b).min())
        return a / (2 * sigma**2) + second + math.log(10) / (a - 1)

    by_hand = min(price(a) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in np.arange(2, 200, 2.0))
    found = selection_epsilon([[LedgerEntry(GAUSSIAN, sigma, 1.0, 1, "gradient")]], count, delta)
    assert found == pytest.approx(by_hand, rel=2e-2)


@pytest.mark.parametrize(("eta", "gamma"), [(-1.0, 0.5), (math.nan, 0.5), (1.0, 0.0), (1.0, 1.0)])
def test_no_distribution(eta: float, gamma: float) -> None:
    with pytest.raises(ValueError, match="no distribution"):
        TrialCount(eta, gamma)
