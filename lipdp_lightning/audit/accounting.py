"""The plan's epsilon beside a lower estimate of the same composition, by another library's optimistic rounding."""

from __future__ import annotations

import math
from functools import lru_cache

from ..privacy.accountants import REPLACE_ONE
from ..privacy.plan import PrivacyPlan
from ..privacy.spending import Spending
from .findings import Finding, verdict

_SLACK = 2e-3  # relative, between two discretisations that both round down


@lru_cache
def optimistic_epsilon(plan: PrivacyPlan) -> float:
    """Epsilon of the plan's steps by privacy loss distributions rounded DOWN: no sound accountant reports less."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    relation = (
        NeighboringRelation.REPLACE_ONE if plan.adjacency == REPLACE_ONE else NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    interval = 1e-4 if plan.steps <= 2000 else 1e-3
    step = pld.from_gaussian_mechanism(
        standard_deviation=plan.step_noise_multiplier, pessimistic_estimate=False, sampling_prob=plan.sample_rate,
        value_discretization_interval=interval, use_connect_dots=False, neighboring_relation=relation,
    )  # fmt: skip
    return float(step.self_compose(plan.steps).get_epsilon_for_delta(plan.delta))


@lru_cache
def claimed_epsilon(plan: PrivacyPlan) -> float:
    """What a run under the plan reports; infinite where it has no guarantee."""
    return Spending(plan).guarantee().epsilon if plan.noise_multiplier > 0 else math.inf


def accounting_finding(plan: PrivacyPlan, claimed: float) -> Finding:
    lowest = optimistic_epsilon(plan)
    broken = claimed < lowest * (1 - _SLACK)
    text = (
        f"The plan states epsilon {claimed:.4f} at delta {plan.delta:g} ({plan.adjacency}, {plan.accountant}); privacy "
        f"loss distributions rounded down give {lowest:.4f}, below which no sound account of these steps can be."
    )
    return Finding(
        "accounting", "Does the stated epsilon cover the plan's steps?", verdict(broken), text,
        factor=lowest / claimed if claimed > 0 else math.inf, epsilon_claimed=claimed,
        values={"epsilon_rounded_down": lowest},
    )  # fmt: skip
