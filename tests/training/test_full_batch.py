"""A batch as large as the data set: a Gaussian mechanism without sampling at every step."""

from __future__ import annotations

import math
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from scipy.stats import norm
from small_runs import fit, make_module, make_plan

from lipdp_lightning.accounting.accountants import epsilon_of
from lipdp_lightning.accounting.events import GAUSSIAN
from lipdp_lightning.training import PrivateModule

STEPS, SIGMA, DELTA = 200, 30.0, 1e-5


def exact_epsilon() -> float:
    """Of ``STEPS`` Gaussian mechanisms, which are one of multiplier SIGMA / sqrt(STEPS) (Balle and Wang 2018)."""
    shift = math.sqrt(STEPS) / SIGMA

    def delta(epsilon: float) -> float:
        return norm.cdf(shift / 2 - epsilon / shift) - math.exp(epsilon) * norm.cdf(-shift / 2 - epsilon / shift)

    low, high = 0.0, 50.0
    for _ in range(80):
        low, high = ((low + high) / 2, high) if delta((low + high) / 2) > DELTA else (low, (low + high) / 2)
    return high


@pytest.mark.parametrize(
    ("accountant", "slack"), [pytest.param("prv", 1.01, marks=pytest.mark.slow), ("pld", 1.01), ("rdp", 1.2)]
)
def test_its_epsilon_is_that_of_a_gaussian(accountant: str, slack: float) -> None:
    plan = make_plan(
        dataset_size=1000, expected_batch_size=1000, steps=STEPS, noise_multiplier=SIGMA, delta=DELTA,
        accountant=accountant, allow_noncertified=False,
    )  # fmt: skip
    assert plan.sample_rate == 1 and [event.mechanism for event in plan.events()] == [GAUSSIAN]
    bound = epsilon_of(accountant, plan.events(), plan.delta, plan.adjacency).epsilon
    assert exact_epsilon() <= bound <= slack * exact_epsilon()
    half = make_plan(
        dataset_size=1000, expected_batch_size=500, steps=STEPS, noise_multiplier=SIGMA, delta=DELTA,
        accountant=accountant,
    )  # fmt: skip
    sampled = epsilon_of(accountant, half.events(), half.delta, half.adjacency).epsilon
    assert sampled < exact_epsilon(), "a sample of half the rows is accounted for like all of them"


class Ids(Callback):
    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.rows.setdefault(trainer.global_step, []).extend(batch[2].tolist())


def test_every_row_is_in_every_step() -> None:
    seen = Ids()
    fit(make_plan(expected_batch_size=60, steps=3), seen, physical_batch_size=16)
    assert [sorted(rows) for rows in seen.rows.values()] == [list(range(60))] * 3


def test_a_full_batch_with_shares_trains() -> None:
    plan = make_plan(expected_batch_size=60, steps=2, allocation="custom", group_weights=(("0", 1.0), ("*", 4.0)))
    module, trainer = fit(plan, module=make_module())
    assert isinstance(module, PrivateModule) and trainer.global_step == 2
