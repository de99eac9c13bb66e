"""Computes what a search has spent: every trial alone, and all of them together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..accounting.accountants import epsilon_of
from ..accounting.events import LedgerEntry
from ..privacy.plan import PrivacyPlan
from .search import beside_of, events_of


@dataclass(frozen=True)
class Cost:
    """Guarantees of a search, infinite if a trial has none; ``delta`` is that of every trial alone.

    ``summed`` holds at ``summed_delta``, by basic composition; ``composed`` at ``delta``, by Renyi composition of all
    steps of all trials. Failed trials count with all the steps of their plans.
    """

    trials: int
    delta: float
    summed: float
    summed_delta: float
    composed: float


def bound(events: Sequence[LedgerEntry], plan: PrivacyPlan, accountant: str) -> float:
    """Returns epsilon of a ledger under the relation and unit of the plan."""
    if any(event.noise_multiplier == 0 for event in events):
        return math.inf
    found = epsilon_of(accountant, events, plan.delta, plan.adjacency, plan.max_examples_per_unit)
    return found.epsilon


def cost_of(trials: Sequence[Any], plan: PrivacyPlan, certified: bool) -> Cost:
    """Returns the cost of the trials that had a plan; ``plan`` is any of theirs, for the constants that no trial may
    change.
    """
    ledgers = [events for trial in trials if (events := events_of(trial)) is not None]
    if not ledgers:
        return Cost(0, plan.delta, 0.0, 0.0, 0.0)
    if not certified:
        return Cost(len(ledgers), plan.delta, math.inf, math.inf, math.inf)
    alone = {events: bound(events, plan, plan.accountant) for events in set(ledgers)}
    together = bound([event for events in ledgers for event in events], plan, "rdp")
    beside = math.fsum(beside_of(trial) for trial in trials if events_of(trial) is not None)
    summed = math.fsum(alone[events] for events in ledgers) + beside
    return Cost(len(ledgers), plan.delta, summed, len(ledgers) * plan.delta, together + beside)
