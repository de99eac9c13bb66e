"""ROC, reliability and Hosmer-Lemeshow: true values beside the private ones, costs by brute force."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import chi2
from sklearn.metrics import roc_auc_score

from lipdp_lightning.curves import (
    Grid,
    NoiseSource,
    curve_mechanism,
    private_hosmer_lemeshow,
    private_reliability,
    private_roc,
)
from lipdp_lightning.curves.hosmer_lemeshow import group_sums, statistic, sums_cost
from lipdp_lightning.curves.reliability import UNIT, half_open, reliability_cost

LOUD = 1e7
SECRET = bytes(16)


def predictions(count: int = 4000, seed: int = 0, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Calibrated probabilities on multiples of 1/256, and labels; `shift` moves the truth away."""
    generator = np.random.default_rng(seed)
    p = np.round(generator.beta(1.5, 2.0, count) * 256) / 256
    return p, (generator.random(count) < np.clip(p + shift, 0, 1)).astype(int)


def roc_of(epsilon: float, seed: int = 0, adjacency: str = "replace_one", name: str = "laplace"):  # type: ignore[no-untyped-def]
    scores, labels = predictions()
    design = curve_mechanism(name, 8, epsilon, adjacency=adjacency, curves=2)
    return private_roc(scores, labels, Grid(0.0, 1.0, 8), design, NoiseSource(bytes([seed]) * 16))


def test_without_noise_rates_and_area_are_the_true_ones() -> None:
    scores, labels = predictions()
    curve = roc_of(LOUD)
    assert curve.auc() == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    thresholds = curve.grid.edges
    assert curve.true_positive_rate[1:] == pytest.approx([np.mean(scores[labels == 1] > t) for t in thresholds[1:]])
    assert curve.false_positive_rate[1:] == pytest.approx([np.mean(scores[labels == 0] > t) for t in thresholds[1:]])


@pytest.mark.parametrize("adjacency", ["replace_one", "add_remove"])
def test_with_noise_the_area_is_near_and_its_interval_holds_it(adjacency: str) -> None:
    truth = roc_auc_score(*predictions()[::-1])
    hits = 0
    for seed in range(30):
        curve = roc_of(2.0, seed, adjacency, "factorization")
        assert curve.auc() == pytest.approx(truth, abs=0.03)
        low, high = curve.auc_interval(0.9, 99, np.random.default_rng(seed))
        hits += low <= truth <= high
    assert hits >= 26
    assert high - low < 0.25


def test_the_curves_of_a_pair_have_different_noise() -> None:
    scores, labels = np.full(40, 0.5), np.arange(40) % 2
    design = curve_mechanism("laplace", 4, 0.5, curves=2)
    curve = private_roc(scores, labels, Grid(0.0, 1.0, 4), design, NoiseSource(SECRET))
    assert not np.array_equal(curve.positives, curve.negatives)


def test_the_pair_is_charged_once_with_its_joint_scale() -> None:
    booking = roc_of(0.8).booking()
    assert booking.epsilon == 0.8
    for levels in (5, 8):
        half = math.ceil((levels + 1) / 2)
        replace = curve_mechanism("laplace", levels, 0.8, curves=2)
        assert replace.sensitivity == 2 * half and replace.scale >= Fraction(2 * half) / Fraction(0.8)
        assert curve_mechanism("laplace", levels, 0.8, adjacency="add_remove", curves=2).sensitivity == half


@pytest.mark.parametrize("labels", [[0, 1, 2, 1], [0, 1]])
def test_labels_that_are_none_are_refused(labels: list[int]) -> None:
    with pytest.raises(ValueError, match="label"):
        private_roc(
            [0.1, 0.2, 0.3, 0.4], labels, Grid(0, 1, 2), curve_mechanism("laplace", 2, 1, curves=2), NoiseSource()
        )


def test_groups_are_half_open_and_hold_every_value_once() -> None:
    thresholds = np.array([0.0, 0.25, 0.5, 1.0])
    assert half_open(np.array([0.0, 0.25, 0.2500001, 0.5, 1.0]), thresholds).tolist() == [0, 0, 1, 1, 2]


RECORDS = list(itertools.product((0.0, 0.1, 0.25, 0.3, 0.5, 0.9, 1.0), (0, 1)))


def changes(sums) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """Largest L1 change of the sums by one record more, and by another record, over all of a set of records."""
    alone = [sums(np.array([p]), np.array([bool(y)])) for p, y in RECORDS]
    added = max(float(np.abs(a).sum()) for a in alone)
    replaced = max(float(np.abs(a - b).sum()) for a, b in itertools.combinations(alone, 2))
    return added, replaced


def test_sums_of_half_open_groups_change_by_the_stated_cost() -> None:
    thresholds = np.array([0.0, 0.25, 0.5, 1.0])
    added, replaced = changes(lambda p, y: group_sums(p, y, thresholds) / UNIT)
    assert added == sums_cost("add_remove") == 2
    assert replaced == sums_cost("replace_one") == 4


def test_groups_closed_at_both_ends_cost_twice_as_much() -> None:
    """As Algorithm 10 defines them: a record on a threshold is in two groups."""
    thresholds = np.array([0.0, 0.25, 0.5, 1.0])

    def closed(p: np.ndarray, y: np.ndarray) -> np.ndarray:
        inside = (thresholds[:-1, None] <= p) & (p <= thresholds[1:, None])
        return np.stack([inside @ p, inside @ (1 - p), inside @ y.astype(float), inside @ (1 - y.astype(float))])

    added, replaced = changes(closed)
    assert added == 4 and replaced > sums_cost("replace_one")


def test_the_reliability_diagrams_cost_is_its_sensitivity() -> None:
    bins = 4
    edges = np.arange(bins + 1) / bins
    middle = (edges[1:] + edges[:-1]) / 2

    def sums(p: np.ndarray, y: np.ndarray) -> np.ndarray:
        group = half_open(p, edges)
        rows = (y, ~y, p - middle[group])
        return np.stack([np.bincount(group, weights=row, minlength=bins) for row in rows])

    added, replaced = changes(sums)
    assert added == pytest.approx(float(reliability_cost(bins, "add_remove")))
    assert replaced == pytest.approx(float(reliability_cost(bins, "replace_one")))


def test_without_noise_the_diagram_is_the_true_one() -> None:
    p, y = predictions()
    diagram = private_reliability(p, y, LOUD, NoiseSource(SECRET))
    group = half_open(p, np.arange(11) / 10)
    assert diagram.positives == pytest.approx(np.bincount(group, weights=y))
    assert diagram.predicted == pytest.approx([p[group == g].mean() for g in range(10)], abs=1e-4)
    assert diagram.expected_error() < 0.04


def test_every_number_of_the_diagram_has_noise_of_its_scale() -> None:
    p, y = predictions(500)
    exact = private_reliability(p, y, LOUD, NoiseSource(SECRET))
    drawn = [private_reliability(p, y, 0.5, NoiseSource(bytes([s]) * 16)) for s in range(60)]
    stated = math.sqrt(2) * float(reliability_cost(10, "replace_one")) / 0.5
    for name in ("positives", "negatives", "centred"):
        noise = np.array([getattr(d, name) - getattr(exact, name) for d in drawn])
        assert noise.std() == pytest.approx(stated, rel=0.25), name


def test_every_sum_of_the_groups_has_noise_of_its_scale() -> None:
    p, y = predictions(500)
    drawn = [private_hosmer_lemeshow(p, y, 2.0, NoiseSource(bytes([s]) * 16), levels=5) for s in range(60)]
    for row in range(4):
        noise = [d.sums[row] - group_sums(p, y.astype(bool), d.thresholds)[row] / UNIT for d in drawn]
        assert np.concatenate(noise).std() == pytest.approx(math.sqrt(2) * 9 / 2.0, rel=0.25)


def test_the_diagrams_interval_holds_the_true_shares() -> None:
    p, y = predictions()
    group = half_open(p, np.arange(11) / 10)
    truth = np.array([y[group == g].mean() for g in range(10)])
    hits = []
    for seed in range(100):
        low, high = private_reliability(p, y, 0.2, NoiseSource(bytes([seed]) * 16)).observed_interval(0.8)
        hits.append(bool(np.all(low <= truth) and np.all(truth <= high)))
    assert np.mean(hits) >= 0.7
    assert float(np.mean(high - low)) < 0.8


def test_without_noise_the_statistic_is_the_true_one() -> None:
    p, y = predictions()
    test = private_hosmer_lemeshow(p, y, LOUD, NoiseSource(SECRET), levels=8)
    group = half_open(p, test.thresholds)
    expected = np.array([[p[group == g].sum(), (1 - p[group == g]).sum()] for g in range(10)]).T
    observed = np.array([[y[group == g].sum(), (1 - y[group == g]).sum()] for g in range(10)]).T
    truth = ((observed - expected) ** 2 / expected).sum()
    assert test.statistic == pytest.approx(truth, rel=1e-3)
    assert np.bincount(group).min() > 200  # ten groups of about four hundred
    assert test.chi_squared_p_value() == pytest.approx(chi2.sf(truth, 10), rel=0.02)
    assert test.chi_squared_p_value(fitted=True) == pytest.approx(chi2.sf(truth, 8), rel=0.02)


@pytest.mark.parametrize("adjacency, whole", [("replace_one", 10 + 4), ("add_remove", 6 + 2)])
def test_the_budget_is_divided_so_that_every_noise_has_one_scale(adjacency: str, whole: int) -> None:
    """epsilon / (L + 4): the thesis's L + 9 counts 8 statistics, and L + 1 for the curve."""
    p, y = predictions(500)
    test = private_hosmer_lemeshow(p, y, 1.4, NoiseSource(SECRET), levels=10, adjacency=adjacency)
    assert sum(release.epsilon for release in test.releases) == pytest.approx(1.4, rel=1e-15)
    assert float(test.scale) == pytest.approx(whole / 1.4, rel=1e-5)
    curve = curve_mechanism("laplace", 10, test.releases[0].epsilon, adjacency=adjacency)
    assert float(curve.scale) == pytest.approx(whole / 1.4, rel=1e-5)


def test_the_p_value_accounts_for_the_noise() -> None:
    """Of calibrated predictions: chi-squared alone rejects nearly always, ours about as often as it says."""
    ours, alone = [], []
    for seed in range(60):
        p, y = predictions(2000, seed)
        test = private_hosmer_lemeshow(p, y, 1.0, NoiseSource(bytes([seed]) * 16), levels=8)
        ours.append(test.p_value(199, np.random.default_rng(seed)))
        alone.append(test.chi_squared_p_value())
    assert np.mean(np.array(alone) < 0.05) > 0.8
    assert np.mean(np.array(ours) < 0.05) < 0.2


def test_a_badly_calibrated_model_is_found_through_the_noise() -> None:
    p, y = predictions(20_000, 1, shift=0.12)
    test = private_hosmer_lemeshow(p, y, 2.0, NoiseSource(SECRET), mechanism="factorization")
    assert test.p_value(199, np.random.default_rng(0)) < 0.05


def test_the_statistic_does_not_divide_by_noise() -> None:
    assert statistic(np.array([[0.0, -3.0], [5.0, 5.0], [1.0, 0.0], [5.0, 5.0]])) == pytest.approx(1.0 + 9.0)


@pytest.mark.parametrize("bad", [-0.1, 1.1, np.nan])
def test_probabilities_that_are_none_are_refused(bad: float) -> None:
    for release in (private_hosmer_lemeshow, private_reliability):
        with pytest.raises(ValueError, match="probability"):
            release([0.5, bad], [0, 1], 1.0, NoiseSource(SECRET))
