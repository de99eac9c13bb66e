"""Fact 4.1 of paper 003, and what it does not say: short steps forget noise of one size, and not that of one
epsilon."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lipdp_lightning.accounting.accountants import epsilon_of
from lipdp_lightning.accounting.events import GAUSSIAN, LedgerEntry
from lipdp_lightning.studies.dynamics import Clipped, Unclipped
from lipdp_lightning.studies.dynamics.noisy_descent import distance_to_the_flow, noisy_descent
from lipdp_lightning.studies.dynamics.problems import LOSS, make_problem, median_norm

STEPS = (8, 32, 128)


def distances(clipping: str, growing: float) -> list[float]:
    """How far noise takes the weights, for more and more steps, with a deviation of steps to that power."""
    problem = make_problem(0, hidden=(4,))
    radius = median_norm(problem)
    factors = Unclipped() if clipping == "none" else Clipped(clipping, radius)
    return [
        distance_to_the_flow(
            problem.network, problem.x, problem.y, LOSS, factors, time=0.05, steps=steps,
            deviation=radius * (steps / STEPS[0]) ** growing, seeds=4,
        )
        for steps in STEPS
    ]  # fmt: skip


@pytest.mark.parametrize(
    "clipping", [pytest.param("none", marks=pytest.mark.slow), "local", pytest.param("global", marks=pytest.mark.slow)]
)
def test_noise_of_a_fixed_deviation_vanishes_with_the_root_of_the_steps(clipping: str) -> None:
    first, *_, last = distances(clipping, 0.0)
    assert math.log(last / first) / math.log(STEPS[-1] / STEPS[0]) == pytest.approx(-0.5, abs=0.12)


def test_at_one_epsilon_noise_does_not_vanish() -> None:
    """The deviation that keeps epsilon grows with the root of the steps, and the distance stays what it is."""
    spent = [epsilon_of("pld", [LedgerEntry(GAUSSIAN, math.sqrt(n), 1.0, n)], 1e-5).epsilon for n in STEPS]
    assert max(spent) == pytest.approx(min(spent), rel=1e-3)
    first, *_, last = distances("local", 0.5)
    assert last > 0.7 * first


def test_one_step_is_the_formula() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 1, bias=False)).double()
    x, y = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    weights = network[0].weight.detach().clone().flatten()
    moved = noisy_descent(network, x, y, LOSS, Unclipped(), time=0.3, steps=1, deviation=0.0)
    gradient = ((network(x) - y) * x).sum(0).detach()
    torch.testing.assert_close(moved, weights - 0.3 / 5 * gradient)
    assert torch.equal(network[0].weight.detach().flatten(), weights)
