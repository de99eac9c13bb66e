"""Compares the plan's epsilon with a lower estimate of the same composition, from privacy loss distributions rounded
down.
"""

from __future__ import annotations

import math
from functools import lru_cache, reduce

from ..accounting.accountants import REPLACE_ONE, Spending
from ..bound_text import lower_text, upper_text
from ..privacy.plan import PrivacyPlan
from .findings import Finding, verdict

_SLACK = 2e-3  # relative, between two discretisations that both round down


@lru_cache
def optimistic_epsilon(plan: PrivacyPlan) -> float:
    """Returns epsilon of the plan's releases by privacy loss distributions rounded DOWN; no sound accountant reports
    less.
    """
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    relation = (
        NeighboringRelation.REPLACE_ONE if plan.adjacency == REPLACE_ONE else NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    interval = 1e-4 if plan.steps <= 2000 else 1e-3
    parts = [
        pld.from_gaussian_mechanism(
            standard_deviation=event.noise_multiplier, pessimistic_estimate=False, sampling_prob=event.sample_rate,
            value_discretization_interval=interval, use_connect_dots=False, neighboring_relation=relation,
        ).self_compose(event.count)
        for event in plan.events()
    ]  # fmt: skip
    whole = reduce(lambda one, other: one.compose(other), parts)
    return float(whole.get_epsilon_for_delta(plan.delta))


@lru_cache
def claimed_epsilon(plan: PrivacyPlan) -> float:
    """Returns the epsilon that a run under the plan reports; it is infinite if the run has no guarantee."""
    return Spending(plan).guarantee().epsilon if plan.noise_multiplier > 0 else math.inf


def accounting_finding(plan: PrivacyPlan, claimed: float) -> Finding:
    """Checks that the claimed epsilon is not below :func:`optimistic_epsilon`."""
    lowest = optimistic_epsilon(plan)
    broken = claimed < lowest * (1 - _SLACK)
    text = (
        f"The plan states epsilon {upper_text(claimed, 5)} at delta {upper_text(plan.delta)} ({plan.adjacency}, "
        f"{plan.accountant}); privacy loss distributions rounded down give {lower_text(lowest, 5)}, "
        "and no sound accountant can report less."
    )
    return Finding(
        "accounting", "Does the stated epsilon cover all that the plan releases?", verdict(broken), text,
        factor=lowest / claimed if claimed > 0 else math.inf, epsilon_claimed=claimed,
        values={"epsilon_rounded_down": lowest},
    )  # fmt: skip
