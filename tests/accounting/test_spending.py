"""Epsilon as a run goes on: lipdp_lightning/accounting/accountants.py."""

from __future__ import annotations

import itertools
import math
import warnings
from functools import lru_cache
from typing import Any

import pytest
from private_step import make_plan

from lipdp_lightning.accounting.accountants import Spending, epsilon_of
from lipdp_lightning.accounting.events import LedgerEntry
from lipdp_lightning.privacy.plan import PrivacyPlan

OPTIONS: dict[str, dict[str, Any]] = {
    "prv": {"accountant": "prv"},
    "pld": {"accountant": "pld"},
    "rdp": {"accountant": "rdp"},
    "replace one": {"accountant": "pld", "adjacency": "replace_one"},
    "groups": {"accountant": "rdp", "unit": "group", "max_examples_per_unit": 3},
    "radius": {
        "accountant": "rdp", "scaling": "radius", "radius_quantile": 0.5, "radius_noise_multiplier": 2.0,
    },
    "full batch": {"accountant": "pld", "expected_batch_size": 1000, "noise_multiplier": 20.0},
}  # fmt: skip


@lru_cache
def spending(name: str) -> Spending:
    return Spending(make_plan(steps=90, noise_multiplier=OPTIONS[name].get("noise_multiplier", 1.1), **{
        k: v for k, v in OPTIONS[name].items() if k != "noise_multiplier"
    }), points=6)  # fmt: skip


@lru_cache
def lower_bound(noise_multiplier: float, sample_rate: float, delta: float, steps: int) -> float:
    """No valid epsilon of so many steps is below this: the lower end of the proven bracket (add/remove of one)."""
    entry = LedgerEntry("subsampled_gaussian", noise_multiplier, sample_rate, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return epsilon_of("prv", [entry], delta).lower


def is_an_upper_bound(shown: Any, plan: PrivacyPlan) -> bool:
    constants = plan.step_noise_multiplier, plan.sample_rate, plan.delta
    return all(shown(steps) >= lower_bound(*constants, steps) for steps in (1, 14, 15, 16, 61, 89, 90))


@pytest.mark.parametrize("name", ["prv", "pld", "rdp"])
def test_shown_is_an_upper_bound_on_the_epsilon_of_the_steps_taken(name: str) -> None:
    assert is_an_upper_bound(spending(name).shown, spending(name)._plan)


def test_broken_displays_fail_the_same_check() -> None:
    """The grid point before the step, and a share of the guarantee in proportion to the steps."""
    known = spending("prv")
    plan = known._plan
    assert not is_an_upper_bound(lambda steps: known.shown(steps // 15 * 15), plan)
    assert not is_an_upper_bound(lambda steps: known.guarantee().epsilon * steps / plan.steps, plan)


@pytest.mark.parametrize("name", OPTIONS)
def test_shown_rises_to_the_guarantee_and_not_above(name: str) -> None:
    values = [spending(name).shown(steps) for steps in range(91)]
    guarantee = spending(name).guarantee().epsilon
    assert values[0] == 0.0 and all(a <= b for a, b in itertools.pairwise(values))
    assert values[1] > 0 and values[-1] <= guarantee
    assert values[-1] == pytest.approx(guarantee, rel=0.03)
    for steps in (1, 37, 75):
        assert values[steps] >= 0.97 * spending(name).exactly(steps).epsilon


def test_the_guarantee_is_that_of_the_planned_steps_by_the_plans_accountant() -> None:
    known = spending("rdp")
    entry = LedgerEntry("subsampled_gaussian", 1.1, 0.02, 90)
    assert known.guarantee().epsilon == epsilon_of("rdp", [entry], 1e-5).epsilon
    assert known.guarantee().accountant == known.exactly(90).accountant == "rdp"
    assert known.exactly(0).epsilon == 0.0 < known.exactly(45).epsilon < known.guarantee().epsilon
    # the quantile's noise joins the step, groups count as groups
    joined = spending("radius")
    assert joined._plan.step_noise_multiplier < joined._plan.noise_multiplier
    assert joined.guarantee().epsilon > known.guarantee().epsilon
    assert spending("groups").guarantee().epsilon > 3 * known.guarantee().epsilon


def test_steps_beyond_the_plan_are_not_hidden() -> None:
    """Other branches of a run may have spent more than was planned."""
    known = spending("pld")
    over = known.shown(91)
    assert over > known.guarantee().epsilon
    assert over >= known.exactly(91).epsilon * (1 - 1e-6)
    assert known.shown(105) == over < known.shown(106)


def test_only_a_grid_of_step_counts_is_computed() -> None:
    known = Spending(make_plan(steps=1000, accountant="rdp"), points=20)
    for steps in range(1001):
        known.shown(steps)
    assert len(known._known) == 21
    short = Spending(make_plan(steps=3, accountant="rdp"), points=20)
    assert [short.shown(s) for s in range(4)] == sorted({short.shown(s) for s in range(4)})


def test_a_run_without_noise_shows_no_number() -> None:
    plan = make_plan(noise_multiplier=0.0, allow_noncertified=True)
    assert Spending(plan).shown(1) == math.inf and Spending(plan).guarantee().epsilon == math.inf
