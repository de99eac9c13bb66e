"""Laplace noise for layers and private choices: scales, exact distributions, an attack, and broken variants."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from lipdp_lightning.curves.discrete_noise import NoiseSource, permute_and_flip
from lipdp_lightning.studies.pure.absolute_sums import AbsoluteBound, Sizes
from lipdp_lightning.studies.pure.choices import choice_entry, choose, exponential_mechanism, frank_wolfe
from lipdp_lightning.studies.pure.laplace_noise import (
    grid_steps,
    laplace_entry,
    laplace_multiplier,
    laplace_release,
    laplace_scales,
)
from lipdp_lightning.studies.pure.mixed_ledger import mixed_epsilon

BOUNDS = [AbsoluteBound("first", 2, Sizes(3.0, 1.0)), AbsoluteBound("second", 1, Sizes(0.5, 0.5))]


def source(seed: int) -> NoiseSource:
    return NoiseSource(seed.to_bytes(16, "big"))


def spent(scales: dict[str, float], bounds: list[AbsoluteBound]) -> float:
    """The largest change of the log-density, with what rounding to the grid moves."""
    steps = grid_steps(bounds)
    return sum((b.sizes.total + b.numel * steps[b.name]) / scales[b.name] for b in bounds)


def test_the_scales_of_all_layers_share_one_epsilon() -> None:
    scales = laplace_scales(BOUNDS, 2.0)
    assert 0.499 < spent(scales, BOUNDS) <= 0.5
    # each layer alone at the multiplier, as paper 000 does it for Gaussian noise, spends as often as there are layers
    alone = {b.name: 2.0 * b.sizes.total for b in BOUNDS}
    assert spent(alone, BOUNDS) > 0.99

    def variance(chosen: dict[str, float]) -> float:
        return sum(b.numel * chosen[b.name] ** 2 for b in BOUNDS)

    for factor in (0.8, 1.25):
        moved = {"first": scales["first"] * factor, "second": 1.0}
        left = 0.5 - BOUNDS[0].sizes.total / moved["first"]
        moved["second"] = BOUNDS[1].sizes.total / left
        assert variance(moved) > variance(scales)


def lower_epsilon(bounds: list[AbsoluteBound], multiplier: float, runs: int = 4000) -> float:
    """A lower bound on the epsilon of a release, from how often two neighbouring sums fall on one side (95 %)."""
    own, claimed = source(1), [BOUNDS[0]]
    hits = []
    for value in (0.0, 3.0):  # the one example's gradient is (3, 0), within the l1 bound
        sums = {"first": [torch.tensor([value, 0.0], dtype=torch.float64)]}
        released = [laplace_release(sums, bounds or claimed, multiplier, own)["first"][0][0] for _ in range(runs)]
        hits.append(sum(float(x) > 3.0 for x in released) / runs)
    margin = 3 / math.sqrt(runs)
    return math.log(max(hits[1] - margin * math.sqrt(hits[1]), 1e-9) / (hits[0] + margin * math.sqrt(hits[0]) + 1e-4))


@pytest.mark.slow
def test_an_attack_stays_below_epsilon_and_exceeds_it_for_a_bound_of_the_largest_entry() -> None:
    assert 0.6 < lower_epsilon([BOUNDS[0]], 1.0) <= 1.0
    broken = AbsoluteBound("first", 2, Sizes(1.0, 1.0))
    assert lower_epsilon([broken], 1.0) > 1.5


def test_released_noise_has_its_scale_and_is_on_the_grid() -> None:
    sums = {"first": [torch.zeros(4000, dtype=torch.float64)], "second": [torch.zeros(1, dtype=torch.float64)]}
    bounds = [AbsoluteBound("first", 4000, Sizes(3.0, 1.0)), BOUNDS[1]]
    noise = laplace_release(sums, bounds, 1.0, source(2))["first"][0]
    scale, step = laplace_scales(bounds, 1.0)["first"], grid_steps(bounds)["first"]
    assert float(noise.abs().mean()) == pytest.approx(scale, rel=0.08)
    assert torch.equal((noise / step).round() * step, noise)
    with pytest.raises(ValueError, match="float64"):
        laplace_release({"first": [torch.zeros(2)], "second": [torch.zeros(1)]}, BOUNDS, 1.0, source(2))
    for wrong in (0.0, math.inf, -1.0):
        with pytest.raises(ValueError, match="HINT"):
            laplace_scales(BOUNDS, wrong)
    with pytest.raises(ValueError, match="HINT"):
        laplace_scales([AbsoluteBound("a", 1, Sizes(math.inf, 1.0))], 1.0)


def exponential_probabilities(utilities: list[int], sensitivity: int, epsilon: float) -> np.ndarray:
    weights = np.exp(epsilon * (np.array(utilities) - max(utilities)) / (2 * sensitivity))
    return weights / weights.sum()


def test_the_exponential_mechanism_has_its_probabilities() -> None:
    utilities, stream, runs = [0, 3, 5], source(3).stream(), 4000
    counts = Counter(exponential_mechanism(stream, utilities, 2, 1.5) for _ in range(runs))
    for index, probability in enumerate(exponential_probabilities(utilities, 2, 1.5)):
        assert abs(counts[index] / runs - probability) < 4.5 * math.sqrt(probability / runs)


def test_neighbours_choices_differ_by_epsilon_and_by_more_without_the_two() -> None:
    """The worst neighbour raises one candidate by the sensitivity and lowers all others."""
    before, after = [0] * 20, [1] + [-1] * 19
    moved = np.log(exponential_probabilities(after, 1, 1.0) / exponential_probabilities(before, 1, 1.0))
    assert 0.9 < float(np.abs(moved).max()) <= 1.0
    broken = np.log(exponential_probabilities(after, 1, 2.0) / exponential_probabilities(before, 1, 2.0))
    assert float(np.abs(broken).max()) > 1.5  # exp(epsilon u / sensitivity), without the factor two


def test_permute_and_flip_is_no_worse_than_the_exponential_mechanism() -> None:
    utilities = [10.0, 8.0, 7.0, 0.0]
    for epsilon in (0.5, 2.0):
        mean = {
            mechanism: sum(utilities[choose(utilities, 1.0, epsilon, own, mechanism)] for _ in range(1500)) / 1500
            for own in (source(4),) for mechanism in (permute_and_flip, exponential_mechanism)
        }  # fmt: skip
        assert mean[permute_and_flip] > mean[exponential_mechanism] - 0.15


def test_frank_wolfe_finds_the_few_coordinates_that_matter_and_stays_in_the_ball() -> None:
    torch.manual_seed(0)
    x = torch.rand(4000, 30, dtype=torch.float64) * 2 - 1
    y = (x[:, 3] - x[:, 7] > 0).double()

    def gradient(weights: torch.Tensor) -> torch.Tensor:
        return x.T @ (torch.sigmoid(x @ weights) - y)

    weights = frank_wolfe(gradient, 30, 6.0, 1.0, 12, 0.2, source(5))
    assert float(weights.abs().sum()) <= 6 + 1e-9
    assert weights[3] > 1 and weights[7] < -1
    ledger = [choice_entry(0.2, 12), laplace_entry(10.0, 1.0, 1)]
    assert mixed_epsilon(ledger, 1e-12) == pytest.approx(12 * 0.2 + 0.1, rel=1e-3)
    assert mixed_epsilon(ledger, 1e-3) < 2.2
    with pytest.raises(ValueError, match="HINT"):
        choose([1.0], 0.0, 1.0, source(6))


@pytest.mark.slow
def test_the_multiplier_meets_its_epsilon() -> None:
    assert laplace_multiplier(0.5, 0.0, 4) == 8.0
    for delta, count, rate in ((1e-5, 100, 1.0), (1e-5, 100, 0.1)):
        found = laplace_multiplier(1.0, delta, count, rate)
        assert mixed_epsilon([laplace_entry(found, rate, count)], delta) <= 1.0
        assert mixed_epsilon([laplace_entry(found * 0.99, rate, count)], delta) > 1.0
