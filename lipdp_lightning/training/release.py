"""What a run releases before its first step, and how whoever loads its weights gets it back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..privacy.keys import new_secret
from ..privacy.statistics import Statistics

STATISTICS = "lipdp_statistics"  # the key in checkpoints


def settle_statistics(strategy: Any, data: Any, restored: Mapping[str, Tensor] | None) -> Statistics:
    """Rank 0 releases the plan's statistics, or finds those the run has released; every rank uses its values.

    To be called before the first branch is on record: a run with branches has released its statistics.
    """
    plan, statistics = strategy.plan, strategy.statistics
    if not plan.preliminary:
        return Statistics()

    def settled() -> Statistics:
        started = strategy.restored is not None or strategy.branches.count > 0
        statistics.settle(plan, data.statistic_terms, restored, started, strategy.fixed_secret or new_secret())
        return statistics

    found: Statistics = strategy.ranks.from_first(settled)
    data.use_statistics(found.values)
    return found


def restore_statistics(checkpoint: Mapping[str, Any], data: Any) -> None:
    """Give a data module the statistics that its inputs were prepared with in training."""
    if checkpoint.get(STATISTICS) and hasattr(data, "use_statistics"):
        data.use_statistics(checkpoint[STATISTICS])
