"""Epsilon during a run, computed cheaply enough to be shown at every step."""

from __future__ import annotations

import math
from typing import Protocol

from .accountants import PrivacyBound, epsilon_of
from .events import LedgerEntry


class PlannedReleases(Protocol):
    """The part of a plan that accountants need."""

    @property
    def steps(self) -> int: ...
    @property
    def delta(self) -> float: ...
    @property
    def adjacency(self) -> str: ...
    @property
    def max_examples_per_unit(self) -> int: ...
    @property
    def accountant(self) -> str: ...
    def events(self, steps: int | None = None) -> tuple[LedgerEntry, ...]:
        """Returns the ledger of so many steps, by default of all planned ones."""


class Spending:
    """Computes upper bounds on the epsilon of the first t steps of a plan.

    The guarantee is the epsilon of the planned steps, by the plan's accountant. Before the end, PLD answers on
    a grid of step counts, each when it is first reached. A step shows the epsilon of the grid point at or after it,
    which is an upper bound, and never above the guarantee. Grid points are multiples of steps / points.
    Statistics that the plan releases before the first step count from the start. The caller counts the steps of all
    branches (privacy/branches.py, `Branches.spent`).

    Args:
        plan: the plan whose releases are counted.
        points: the number of grid points.
    """

    def __init__(self, plan: PlannedReleases, points: int = 20) -> None:
        self._plan = plan
        self._grid = max(1, math.ceil(plan.steps / points))
        self._known: dict[int, float] = {}
        self._guarantee: PrivacyBound | None = None

    def guarantee(self) -> PrivacyBound:
        """Returns the epsilon of all planned steps."""
        if self._guarantee is None:
            self._guarantee = self._bound(self._plan.steps, self._plan.accountant)
        return self._guarantee

    def exactly(self, steps: int) -> PrivacyBound:
        """Returns the epsilon of exactly so many steps, by the plan's accountant."""
        return self.guarantee() if steps == self._plan.steps else self._bound(steps, self._plan.accountant)

    def shown(self, steps: int) -> float:
        """Returns an upper bound on the epsilon of the first ``steps`` steps."""
        planned = self._plan.steps
        point = -(-steps // self._grid) * self._grid
        point = min(point, planned) if steps <= planned else point
        if point not in self._known:
            accountant = self._plan.accountant if self._plan.accountant == "rdp" else "pld"
            limit = self.guarantee().epsilon if point <= planned else math.inf
            self._known[point] = min(self._bound(point, accountant).epsilon, limit)
        return self._known[point]

    def _bound(self, steps: int, accountant: str) -> PrivacyBound:
        plan = self._plan
        entries = plan.events(steps)
        return epsilon_of(accountant, entries, plan.delta, plan.adjacency, plan.max_examples_per_unit)
