"""Laplace noise and choices in a ledger, against closed forms and integrals over the noise itself."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lipdp_lightning.accounting.accountants import epsilon_of
from lipdp_lightning.accounting.events import SUBSAMPLED_GAUSSIAN, LedgerEntry
from lipdp_lightning.accounting.privacy_curves import collect
from lipdp_lightning.studies.pure.mixed_ledger import (
    CHOICE,
    LAPLACE,
    SUBSAMPLED_LAPLACE,
    MixedCurve,
    PureEntry,
    mixed_epsilon,
)


def density(points: np.ndarray, shift: float, scale: float) -> np.ndarray:
    return np.exp(-np.abs(points - shift) / scale) / (2 * scale)


def in_the_plane(shift: tuple[float, float], scale: float, rate: float, epsilon: float) -> float:
    """The larger of both hockey-stick divergences of subsampled noise in two coordinates, by a sum over a grid."""
    grid = np.linspace(-14 * scale, 14 * scale + 1, 701) + 1e-4
    cell = (grid[1] - grid[0]) ** 2
    still = np.outer(density(grid, 0, scale), density(grid, 0, scale))
    moved = np.outer(density(grid, shift[0], scale), density(grid, shift[1], scale))
    mixed = (1 - rate) * still + rate * moved
    return max(
        float(np.maximum(0, one - math.exp(epsilon) * two).sum() * cell)
        for one, two in ((mixed, still), (still, mixed))
    )


def entry(scale: float, rate: float = 1.0, count: int = 1) -> PureEntry:
    return PureEntry(LAPLACE if rate == 1 else SUBSAMPLED_LAPLACE, scale, rate, count)


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_one_release_has_the_closed_form(scale: float) -> None:
    for epsilon in (0.1 / scale, 0.5 / scale, 0.9 / scale):
        delta = -math.expm1((epsilon - 1 / scale) / 2)
        stated = mixed_epsilon([entry(scale)], delta)
        assert epsilon * (1 - 1e-9) <= stated <= epsilon * 1.001
    assert mixed_epsilon([entry(scale)], 1e-9) == pytest.approx(1 / scale, rel=1e-3)


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("shift", [(0.5, 0.5), (0.9, 0.1), (0.3, -0.7)])
def test_differences_in_two_coordinates_are_dominated_by_one(rate: float, shift: tuple[float, float]) -> None:
    curve = MixedCurve([entry(0.8, rate)], False)
    for epsilon in (0.05, 0.2, 0.5, 0.9):
        assert in_the_plane(shift, 0.8, rate, epsilon) <= curve.delta_at(epsilon) + 1e-4
    # differences of the l2 norm that Gaussian noise would allow are not within the same curve
    end = 0.99 * math.log1p(rate * math.expm1(1 / 0.8))
    assert in_the_plane((0.5**0.5, 0.5**0.5), 0.8, rate, end) > curve.delta_at(end) + 1e-3


def test_queries_on_one_sample_join_by_inverses_and_not_by_their_squares() -> None:
    """Two layers, each with Laplace noise of scale 2: one release of scale 1, and not of 2 / sqrt(2)."""
    right, wrong = 1 / (1 / 2 + 1 / 2), 2 / math.sqrt(2)
    end = 0.99 * math.log1p(0.5 * math.expm1(1 / wrong))
    truth = in_the_plane((1.0, 1.0), 2.0, 0.5, end)
    assert MixedCurve([entry(wrong, 0.5)], False).delta_at(end) + 1e-3 < truth
    assert truth <= MixedCurve([entry(right, 0.5)], False).delta_at(end) + 1e-4


def test_choices_add_up_and_are_no_more_than_their_sum() -> None:
    assert mixed_epsilon([PureEntry(CHOICE, 2.0, 1.0, 3)], 1e-12) == pytest.approx(1.5, rel=1e-3)
    many = mixed_epsilon([PureEntry(CHOICE, 20.0, 1.0, 400)], 1e-5)
    assert 400 * (math.exp(0.05) - 1) / (math.exp(0.05) + 1) * 0.05 < many < 400 * 0.05
    # randomised response of 400 rounds, exactly: the loss is 0.05 (400 - 2 K) for binomial K
    from scipy.stats import binom

    k = np.arange(401)
    losses, masses = 0.05 * (400 - 2 * k), binom.pmf(k, 400, 1 / (1 + math.exp(0.05)))
    delta = float(np.maximum(0, -np.expm1(many - losses)) @ masses)
    assert delta <= 1e-5 * (1 + 1e-6) and delta > 0.9e-5


def test_a_mixed_ledger_costs_more_than_either_part_and_less_than_both() -> None:
    steps, extra = LedgerEntry(SUBSAMPLED_GAUSSIAN, 2.0, 0.01, 1000), entry(20.0)
    alone, joined = epsilon_of("pld", [steps], 1e-5).epsilon, mixed_epsilon([steps, extra], 1e-5)
    assert alone < joined < alone + 0.05
    assert MixedCurve([steps], False).delta_at(alone) == pytest.approx(1e-5, rel=0.02)


def test_a_replacement_costs_twice() -> None:
    assert mixed_epsilon([entry(1.0)], 1e-9, "replace_one") == pytest.approx(2.0, rel=1e-3)
    choice = PureEntry(CHOICE, 1.0, 1.0, 1)
    assert mixed_epsilon([choice], 1e-9, "replace_one") == pytest.approx(2.0, rel=1e-3)
    with pytest.raises(ValueError, match="HINT"):
        mixed_epsilon([entry(1.0, 0.1)], 1e-9, "replace_one")
    for wrong in ((0.0, "add_remove"), (1e-6, "replace_two")):
        with pytest.raises(ValueError, match="HINT"):
            mixed_epsilon([choice], *wrong)


@pytest.mark.parametrize("accountant", ["pld", "rdp", "prv"])
def test_laplace_entries_are_never_counted_as_gaussian_ones(accountant: str) -> None:
    with pytest.raises(ValueError, match="not Gaussian"):
        collect([entry(1.0)])
    with pytest.raises(ValueError, match="not Gaussian"):
        epsilon_of(accountant, [LedgerEntry(SUBSAMPLED_GAUSSIAN, 2.0, 0.01, 1000), entry(1.0)], 1e-5)
    with pytest.raises(ValueError, match="mechanism"):
        LedgerEntry(LAPLACE, 1.0, 1.0, 1)
    with pytest.raises(ValueError, match="every example"):
        PureEntry(CHOICE, 1.0, 0.5, 1)
    assert mixed_epsilon([entry(0.0)], 1e-5) == math.inf and mixed_epsilon([], 1e-5) == 0.0
