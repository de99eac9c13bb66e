"""Temperatures: the optimum for public rows, and a selection whose likelihood ratio is what it is booked as."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from test_calibration_scores import example

from lipdp_lightning.calibration import fit_temperature, private_temperature, temperature
from lipdp_lightning.calibration.temperature import GRID, half_range, utilities
from lipdp_lightning.curves.discrete_noise import NoiseSource, permute_and_flip

CLASSES = 4
C = 4 * math.log(CLASSES)


def test_the_fitted_temperature_minimises_cross_entropy() -> None:
    logits, labels = example(800, CLASSES)
    found = fit_temperature(logits, labels)

    def loss(t: float) -> float:
        return torch.nn.functional.cross_entropy(logits.double() / t, labels).item()

    assert 1.6 < found < 2.4  # the labels were drawn at 2
    assert loss(found) <= min(loss(found * ratio) for ratio in np.geomspace(0.2, 5, 4001)) + 1e-12
    inverse = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([inverse], lr=0.5, max_iter=100, tolerance_grad=1e-12)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(logits.double() * inverse, labels)
        value.backward()
        return value

    optimizer.step(closure)
    assert found == pytest.approx(1 / inverse.item(), rel=1e-4)


def worst_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that move utilities far: surely right, surely wrong, undecided, without a finite output."""
    logits = torch.tensor([[9.0, 0, 0, 0], [-C, 0, 0, 0], [-1e4, 0, 0, 0], [0, 0, 0, 0], [math.nan, 0, 0, 0],
                           [math.inf, 0, 0, 0], [-math.inf, 0, 0, 0]])  # fmt: skip
    return logits, torch.zeros(len(logits), dtype=torch.int64)


def moved(function: Any, bound: float = C) -> tuple[int, int]:
    """How far one of the worst rows moves a utility when it is added, and when it replaces another."""
    logits, labels = example(40, CLASSES)
    rows, own = worst_rows()
    before = np.array(function(logits, labels, GRID, bound), dtype=object)
    after = [
        np.array(
            function(torch.cat([logits, rows[i : i + 1]]), torch.cat([labels, own[:1]]), GRID, bound), dtype=object
        )
        for i in range(len(rows))
    ]
    added = max(int(abs(a - before).max()) for a in after)
    return added, max(int(abs(a - b).max()) for a in after for b in after)


def test_one_row_moves_no_utility_by_more_than_the_sensitivity() -> None:
    added, replaced = moved(utilities)
    assert 0.9 * half_range(C) < added <= half_range(C)
    assert 0.9 * 2 * half_range(C) < replaced <= 2 * half_range(C)


def test_losses_that_are_not_clipped_fail_the_same_check() -> None:
    def unclipped(logits: Any, labels: Any, grid: Any, bound: float) -> list[int]:
        each = [torch.nan_to_num(temperature.losses_at(logits, labels, t), posinf=1e9) for t in grid]
        return [int((-losses * temperature.UNIT).sum()) for losses in each]

    assert moved(unclipped)[0] > half_range(C)


def log_ratio(epsilon: float, draws: int = 1200) -> float:
    """The measured log likelihood ratio of the warmer of two temperatures, without and with the worst row."""
    grid, source = (0.25, 16.0), NoiseSource(bytes(16))
    undecided = torch.zeros(3, CLASSES), torch.zeros(3, dtype=torch.int64)
    # sure and right when cold, and of a loss above the largest when warm
    worst = torch.cat([undecided[0], torch.tensor([[2.0, 0, 0, 0]])]), torch.zeros(4, dtype=torch.int64)
    shares = [
        np.mean([private_temperature(*d, epsilon, source, "add_remove", grid, 1.2)[0] == 16.0 for _ in range(draws)])
        for d in (undecided, worst)
    ]
    return float(np.log(shares[0] / shares[1]))


def test_the_likelihood_ratio_is_epsilon_at_worst_and_half_the_sensitivity_exceeds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spread = 0.2  # three deviations of the measured logarithm
    assert 1.0 - spread < log_ratio(1.0) < 1.0 + spread
    monkeypatch.setattr(temperature, "permute_and_flip", lambda s, u, cost, e: permute_and_flip(s, u, cost // 2, e))
    assert log_ratio(1.0) > 1.0 + 3 * spread


def test_with_much_budget_the_private_choice_is_the_best_of_the_grid() -> None:
    logits, labels = example(600, CLASSES)
    chosen, release = private_temperature(logits, labels, 1e4, NoiseSource(), "replace_one", largest_loss=100.0)
    best = fit_temperature(logits, labels)
    assert abs(math.log(chosen / best)) <= math.log(2) / 8
    assert (release.epsilon, release.delta, release.adjacency) == (1e4, 0.0, "replace_one")
    assert "sensitivity 100" in release.mechanism
    loose = [private_temperature(logits, labels, 1e-6, NoiseSource(), "add_remove")[0] for _ in range(30)]
    assert len(set(loose)) > 8 and set(loose) <= set(GRID)


@pytest.mark.parametrize(
    "action",
    [
        lambda z, y: fit_temperature(z[:0], y[:0]),
        lambda z, y: fit_temperature(z * math.nan, y),
        lambda z, y: private_temperature(z, y, 0.0, NoiseSource(), "add_remove"),
        lambda z, y: private_temperature(z, y, 1.0, NoiseSource(), "add_remove", grid=[0.0, 1.0]),
        lambda z, y: private_temperature(z, y, 1.0, NoiseSource(), "add_remove", grid=[]),
        lambda z, y: private_temperature(z, y, 1.0, NoiseSource(), "add_remove", largest_loss=-1.0),
    ],
)
def test_bad_input_to_a_temperature_is_refused_with_a_hint(action: Any) -> None:
    with pytest.raises(ValueError, match="HINT"):
        action(*example(10, CLASSES))
