"""Output perturbation and noisy SGD: sensitivities against closed forms and an attack, noise against its ledger."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lipdp_lightning.accounting.accountants import epsilon_of
from lipdp_lightning.studies.convex_baselines import (
    StronglyConvex,
    logistic_problem,
    minimum_sensitivity,
    noisy_sgd,
    output_entry,
    output_perturbation,
    printed_epsilon,
    printed_output_multiplier,
    sgd_entry,
)


def linear(signs: list[float], declared: int, strength: float) -> StronglyConvex:
    """Losses -s_i w, which are 1-Lipschitz; the minimum of the objective is sum_i s_i / (N g)."""
    values = torch.tensor(signs, dtype=torch.float64)

    def slopes(weights: Tensor, rows: Tensor) -> Tensor:
        return -values[rows][:, None]

    return StronglyConvex(slopes, len(signs), declared, 1, 1.0, strength, 0.0)


def test_the_sensitivity_of_linear_losses_is_their_closed_form_and_is_attained() -> None:
    before, after = linear([1.0, -1.0, 1.0], 4, 0.5), linear([1.0, -1.0, 1.0, 1.0], 4, 0.5)
    changed = linear([1.0, -1.0, -1.0], 4, 0.5)
    assert float(before.minimum(1e-12)) == pytest.approx(1 / (4 * 0.5))
    moved = float((after.minimum(1e-12) - before.minimum(1e-12)).norm())
    assert moved == pytest.approx(minimum_sensitivity(before, 0.0), rel=1e-6)
    replaced = float((changed.minimum(1e-12) - before.minimum(1e-12)).norm())
    assert replaced == pytest.approx(minimum_sensitivity(before, 0.0, "replace_one"), rel=1e-6)


def largest_move(strength: float, declared: int, tolerance: float, seed: int) -> tuple[float, StronglyConvex]:
    """How far the worst of many added rows moves the minimum of a logistic regression."""
    torch.manual_seed(seed)
    x = torch.randn(12, 3, dtype=torch.float64)
    y = (x[:, 0] > 0).long()
    problem = logistic_problem(x, y, declared, strength)
    start = problem.minimum(tolerance)
    worst = 0.0
    for direction in (*torch.eye(3).double(), start / start.norm(), *torch.randn(6, 3).double()):
        for label in (0, 1):
            for sign in (1, -1):
                row = sign * 50 * direction[None]
                more = logistic_problem(torch.cat([x, row]), torch.cat([y, torch.tensor([label])]), declared, strength)
                worst = max(worst, float((more.minimum(tolerance) - start).norm()))
    return worst, problem


@pytest.mark.parametrize("strength", [0.02, 0.5, 3.0])
@pytest.mark.parametrize("tolerance", [1e-9, 1e-3])
def test_no_added_row_moves_the_minimum_further(strength: float, tolerance: float) -> None:
    moved, problem = largest_move(strength, 13, tolerance, 0)
    bound = minimum_sensitivity(problem, tolerance)
    assert moved <= bound
    if strength == 0.5 and tolerance == 1e-9:
        # without the strength, with N twice, or with the exact minimum assumed of a rough one, the same attack succeeds
        assert moved > problem.lipschitz / problem.declared
        assert moved > problem.lipschitz / problem.declared**2 / strength
    if strength == 3.0:
        assert moved > 0.3 * bound


def test_a_rough_minimum_is_further_away_than_the_exact_sensitivity() -> None:
    """Two data sets whose minima coincide; stopping from either side at the tolerance leaves points apart."""
    problem = replace(linear([1.0, 1.0], 100, 1.0), smoothness=400.0)  # smaller steps than needed
    rough, exact = problem.minimum(0.01), problem.minimum(1e-12)
    assert float((rough - exact).norm()) > 0.005
    assert float((rough - exact).norm()) <= minimum_sensitivity(replace(problem, lipschitz=0.0), 0.01)


def test_released_minima_have_the_noise_of_their_ledger() -> None:
    problem = linear([1.0] * 50, 100, 0.5)
    wide = replace(problem, features=2000, slopes=lambda w, rows: torch.zeros(len(rows), 2000, dtype=torch.float64))
    noise = output_perturbation(wide, 3.0, bytes(16), 1e-9)
    assert float(noise.std()) == pytest.approx(3 * minimum_sensitivity(wide, 1e-9), rel=0.06)
    added = epsilon_of("pld", [output_entry(3.0)], 1e-5).epsilon
    replaced = epsilon_of("pld", [output_entry(3.0, "replace_one")], 1e-5, "replace_one").epsilon
    assert replaced == pytest.approx(added, rel=1e-3)
    assert not torch.equal(output_perturbation(problem, 3.0, bytes(16)), output_perturbation(problem, 3.0, b"1" * 16))


def test_the_thesis_noise_of_output_perturbation_fails_for_large_epsilons() -> None:
    for claimed in (0.5, 2.0, 8.0):
        assert epsilon_of("pld", [output_entry(printed_output_multiplier(claimed, 1e-5))], 1e-5).epsilon <= claimed
    assert epsilon_of("pld", [output_entry(printed_output_multiplier(16.0, 1e-5))], 1e-5).epsilon > 18


def test_the_thesis_noise_of_sgd_holds_for_samples_of_one_and_fails_for_larger_ones() -> None:
    assert printed_epsilon(4000, 1, 1000, 1.0, 1e-5) < 0.05
    assert printed_epsilon(4000, 64, 1000, 1.0, 1e-5) > 1.5
    assert printed_epsilon(4000, 512, 1000, 1.0, 1e-5) > 17


def test_sgd_adds_noise_of_its_multiplier_to_samples_of_its_rate() -> None:
    """One step from zero: w = - (sum + noise) / (s g), with a sum of the drawn rows."""
    problem = linear([1.0] * 400, 400, 1.0)
    ends = torch.stack([noisy_sgd(problem, 2.0, 40, 1, 1e9, bytes([i % 256, i // 256] * 8)) for i in range(600)])[:, 0]
    sums = -ends * 40
    variance = 400 * 0.1 * 0.9 + 2.0**2
    assert float(sums.mean()) == pytest.approx(-40, abs=4 * math.sqrt(variance / 600))
    assert float(sums.var()) == pytest.approx(variance, rel=0.2)
    empty = linear([], 400, 1.0)
    assert float(noisy_sgd(empty, 2.0, 40, 1, 1e9, bytes(16)).abs()) > 0  # an empty sample releases noise
    assert (
        epsilon_of("pld", [sgd_entry(2.0, 0.1, 1)], 1e-5).epsilon
        < epsilon_of("pld", [sgd_entry(2, 1.0, 1)], 1e-5).epsilon
    )


def test_both_learn_a_separable_problem() -> None:
    torch.manual_seed(1)
    x = torch.randn(3000, 4, dtype=torch.float64)
    y = (x[:, 0] + x[:, 1] > 0).long()
    problem = logistic_problem(x, y, 3000, 0.02)
    for weights in (
        output_perturbation(problem, 3.73, bytes(16), 1e-6), noisy_sgd(problem, 2.0, 300, 100, 10.0, bytes(16)),
    ):  # fmt: skip
        assert float(((x @ weights > 0) == (y == 1)).double().mean()) > 0.9
    with pytest.raises(ValueError, match="HINT"):
        problem.minimum(0.0, 10)
