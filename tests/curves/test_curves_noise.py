"""The exact samplers, against the laws they claim."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import chisquare

from lipdp_lightning.curves.discrete_noise import (
    NoiseSource,
    bernoulli_exp,
    discrete_laplace,
    discrete_laplace_variance,
    exact_scale,
    on_grid,
    permute_and_flip,
    uniform_below,
)
from lipdp_lightning.key_streams import CounterStream


def stream(seed: int = 0) -> CounterStream:
    return NoiseSource(bytes([seed]) * 16).stream()


@pytest.mark.parametrize("scale", [Fraction(1, 3), Fraction(1), Fraction(7, 2)])
def test_discrete_laplace_has_its_law(scale: Fraction) -> None:
    drawn = discrete_laplace(stream(), 60_000, scale)
    p = math.exp(-1 / scale)
    values = np.arange(-12, 13)
    law = (1 - p) / (1 + p) * p ** np.abs(values)
    kept = law * drawn.size > 8
    seen = np.array([np.sum(drawn == v) for v in values[kept]])
    others = drawn.size - seen.sum()
    expected = np.append(law[kept], 1 - law[kept].sum()) * drawn.size
    assert chisquare(np.append(seen, others)[expected > 3], expected[expected > 3], sum_check=False).pvalue > 1e-4
    assert drawn.var() == pytest.approx(discrete_laplace_variance(scale), rel=0.05)


@pytest.mark.parametrize("gamma", [Fraction(0), Fraction(1, 7), Fraction(1)])
def test_bernoulli_exp_has_its_probability(gamma: Fraction) -> None:
    hits = bernoulli_exp(stream(), np.full(40_000, gamma.numerator), gamma.denominator).mean()
    expected = math.exp(-gamma)
    assert abs(hits - expected) <= 4.5 * math.sqrt(expected * (1 - expected) / 40_000)


def test_uniform_integers_are_uniform_and_below() -> None:
    drawn = uniform_below(stream(), 10, 50_000)
    assert chisquare(np.bincount(drawn, minlength=10)).pvalue > 1e-4
    assert drawn.max() == 9 and drawn.min() == 0
    assert uniform_below(stream(), 3 << 60, 2000).max() > 2 << 60


def test_the_scale_is_never_rounded_down() -> None:
    for cost in (1, 5, 15, 65536 * 9):
        for epsilon in (1e-3, 0.1, 1 / 3, 1.0, 50.0):
            exact = Fraction(cost) / Fraction(epsilon)
            assert exact <= exact_scale(cost, epsilon) <= exact * (1 + Fraction(1, 1000)) + Fraction(1, 1 << 20)
    with pytest.raises(ValueError, match="epsilon"):
        exact_scale(15, 1e-14)


def test_no_two_draws_of_a_source_are_the_same() -> None:
    source = NoiseSource(bytes(16))
    first, second = (discrete_laplace(source.stream(), 200, Fraction(50)) for _ in range(2))
    assert not np.array_equal(first, second)
    again = discrete_laplace(NoiseSource(bytes(16)).stream(), 200, Fraction(50))
    assert np.array_equal(first, again)
    assert not np.array_equal(again, discrete_laplace(NoiseSource().stream(), 200, Fraction(50)))


def test_gaussian_noise_on_the_grid_adds_to_integers_without_rounding() -> None:
    noise = on_grid(stream().normal(2000).numpy() * 7.3, 7.3)
    for count in (1.0, 12_345.0, 2.0**26 + 1):
        assert np.array_equal((noise + count) - count, noise)
    raw = stream().normal(2000).numpy() * 7.3
    assert not np.array_equal((raw + 12_345.0) - 12_345.0, raw)
    assert np.max(np.abs(noise - raw)) <= 7.3 * 2.0**-19


def flip_law(utilities: list[int], epsilon: float) -> np.ndarray:
    counts = np.zeros(len(utilities))
    shared = stream(3)
    for _ in range(3000):
        counts[permute_and_flip(shared, utilities, 1, epsilon)] += 1
    return counts / counts.sum()


def test_permute_and_flip_prefers_utility_within_its_epsilon() -> None:
    here, there = flip_law([0, -1, -4], 1.0), flip_law([-1, 0, -5], 1.0)
    assert here[0] > here[1] > here[2]
    slack = 1.15  # three thousand draws
    assert np.all(here <= math.exp(1.0) * there * slack + 0.01) and np.all(there <= math.exp(1.0) * here * slack + 0.01)
    # P(first) over all orders: it stops there, unless an earlier one was accepted
    a, b = math.exp(-0.5), math.exp(-2.0)
    first = 1 - (a + b) / 2 + a * b / 3
    assert here[0] == pytest.approx(first, abs=0.03)
