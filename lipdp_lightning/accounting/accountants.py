"""The epsilon of a ledger at a delta: `epsilon_of`, which asks one of three accountants.

The number reported (`PrivacyBound.epsilon`) is always an upper bound. Relations (docs/guarantee.md, 1.1, 1.6):

* add_remove: the data sets differ by the presence of one unit (one example, or the rows of one group);
* replace_one: they differ by the value of one unit. PLD accounts for it exactly, with the same noise multiplier, and
  answers for every accountant, since RDP and PRV know add/remove only, for which a replacement is a removal and an
  addition, a group of two. To halve the noise multiplier instead is wrong under subsampling: that pair does not
  dominate.

The rows of a unit of at most m rows are sampled independently, so the m-fold group property is applied to the whole
composition: if adding or removing (or replacing) one row is (e, d)-DP for one (e, d), then m rows are
(m e, d (1 + exp(e) + ... + exp((m-1) e)))-DP. The property holds for every mechanism, and is loose for large m.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lipdp_lightning.accounting.events import LedgerEntry
from lipdp_lightning.accounting.privacy_curves import (
    ADD,
    REMOVE,
    REPLACE,
    AccountantFailure,
    MaximumCurve,
    PldCurve,
    PrivacyCurve,
    PrvCurve,
    RdpCurve,
    Release,
    collect,
)
from lipdp_lightning.bound_text import lower_text, upper_text

ADD_REMOVE = "add_remove"
REPLACE_ONE = "replace_one"
ADJACENCIES = (ADD_REMOVE, REPLACE_ONE)
_EPSILON_LIMIT = 1e9
# the errors that the accounting libraries raise if their numerics fail
_LIBRARY_ERRORS = (ValueError, ArithmeticError, RuntimeError, MemoryError, AssertionError, IndexError)


class AccountantFallbackWarning(UserWarning):
    """Warns that the named accountant could not answer, and another sound one did."""


@dataclass(frozen=True)
class PrivacyBound:
    """States that the mechanism is (epsilon, delta)-DP.

    The smallest true epsilon lies in [lower, upper], where upper == epsilon, and lower is 0 if the accountant only
    gives upper bounds. accountant is the one that answered, and note says why.
    """

    epsilon: float
    lower: float
    upper: float
    accountant: str
    note: str


def epsilon_of(
    accountant: str,
    entries: Iterable[LedgerEntry],
    delta: float,
    adjacency: str = ADD_REMOVE,
    max_examples_per_unit: int = 1,
) -> PrivacyBound:
    """Returns a certified epsilon at ``delta`` of everything in a ledger.

    Every epsilon that a run, a report, a command or a search states comes from this function. A run's ledger is
    `plan.events(branches.spent(step))`, so that statistics and the steps of all branches are composed here. Private
    selection (tuning/selection.py) is the exception: its theorem takes Renyi divergences of one trial.

    Args:
        accountant: "pld", "prv" or "rdp". If it cannot answer, another one does, with a warning that says why.
            For `replace_one`, PLD always answers.
        entries: the ledger.
        delta: the delta of the guarantee, in (0, 1).
        adjacency: "add_remove" or "replace_one".
        max_examples_per_unit: the largest number of rows of one protected unit.

    Raises:
        ValueError: if an argument is out of range, or no accountant can bound epsilon.

    Example:
        >>> epsilon_of("pld", [LedgerEntry("subsampled_gaussian", 1.1, 256 / 60000, 14062)], 1e-5).epsilon
        2.382...
    """
    recorded = [entry for entry in entries if entry.count > 0]
    _validate(accountant, delta, adjacency, max_examples_per_unit)
    if not recorded:
        return PrivacyBound(0.0, 0.0, 0.0, accountant, "nothing was released")
    if any(entry.noise_multiplier == 0 for entry in recorded):
        return PrivacyBound(math.inf, math.inf, math.inf, accountant, "a release without noise has no epsilon")
    releases = collect(recorded)
    if adjacency == REPLACE_ONE and accountant != "pld":
        bound = _first_answer("pld", releases, delta, adjacency, max_examples_per_unit)
        why = f"{accountant} knows add/remove only, and would count a replacement as two examples"
        return replace(bound, note=f"{bound.note}; {why}")
    return _first_answer(accountant, releases, delta, adjacency, max_examples_per_unit)


def _first_answer(name: str, releases: Sequence[Release], delta: float, adjacency: str, rows: int) -> PrivacyBound:
    """Returns the answer of the accountant, or of the first of its fallbacks that has one."""
    reasons: list[str] = []
    for candidate in (name, *_FALLBACKS[name]):
        try:
            bound = _ACCOUNTANTS[candidate](releases, delta, adjacency, rows)
        except _LIBRARY_ERRORS as error:
            reasons.append(f"{candidate} failed: {str(error) or type(error).__name__}")
            continue
        if not reasons:
            return bound
        failed = "; ".join(reasons)
        warnings.warn(f"{failed}: epsilon is from {candidate}.", AccountantFallbackWarning, stacklevel=4)
        return replace(bound, note=f"{bound.note}; instead of {name} ({failed})")
    raise ValueError(
        f"no accountant can bound epsilon at delta {delta} for {releases}: {'; '.join(reasons)}.\n"
        "HINT: use more noise, fewer steps, or a larger delta."
    )


def _upper_bound(name: str, curve: PrivacyCurve, order: int, delta: float, relation: str) -> PrivacyBound:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # tails that are not used may overflow
        epsilon = solve_group(curve, order, delta)
    group = f", group of {order}" if order > 1 else ""
    return PrivacyBound(epsilon, 0.0, epsilon, name, f"{name}, {relation}{group}")


def _rdp(releases: Sequence[Release], delta: float, adjacency: str, rows: int) -> PrivacyBound:
    """Returns the bound by Renyi DP, which is the loosest, and never fails for lack of memory or precision."""
    order = rows if adjacency == ADD_REMOVE else 2 * rows
    return _upper_bound("rdp", RdpCurve(releases), order, delta, _relation(adjacency, rows))


def _pld(releases: Sequence[Release], delta: float, adjacency: str, rows: int) -> PrivacyBound:
    """Returns the bound by privacy loss distributions: the default, the tightest, and exact for replace-one."""
    if adjacency == REPLACE_ONE:
        # adding or removing a row is the replacement of a zero contribution: m replacements cover any group
        curve: PrivacyCurve = PldCurve(releases, REPLACE)
    elif all(q == 1 for _, q, _ in releases):
        curve = PldCurve(releases, REMOVE)  # both directions agree
    else:
        curve = MaximumCurve(PldCurve(releases, REMOVE), PldCurve(releases, ADD))
    return _upper_bound("pld", curve, rows, delta, _relation(adjacency, rows))


def _prv(releases: Sequence[Release], delta: float, adjacency: str, rows: int) -> PrivacyBound:
    """Returns the upper end of a bracket around epsilon, by privacy random variables.

    The library accounts for REMOVE only. That ADD is never worse is proven for one step, but not for compositions, so
    ADD is bounded by PLD, and the larger of the two bounds is returned.

    The bracket rests on a mean of the truncated loss that the library finds by one quadrature over a long range. If
    the quadrature misses a part of the loss, the bracket of many steps lies below the truth. An answer below the
    least epsilon that PLD allows is rejected, and PLD answers instead.
    """
    assert adjacency == ADD_REMOVE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        remove, add = PldCurve(releases, REMOVE), PldCurve(releases, ADD)
        least, rough = least_epsilon(remove, rows, delta), solve_group(remove, rows, delta) / rows
        curve = PrvCurve(releases, delta / math.exp(_log_group_factor(rows, rough)), rough)
        if rows > 1:
            bound = _upper_bound("prv", MaximumCurve(curve, add), rows, delta, _relation(adjacency, rows))
            _reject_below(least, 0.0, bound.upper)
            return bound
        lower, upper = curve.bracket(delta)
        _reject_below(least, lower, upper)
        upper = max(upper, solve_group(add, 1, delta))
    return PrivacyBound(upper, lower, upper, "prv", f"prv, {_relation(adjacency, 1)}, upper end of the bracket")


_ACCOUNTANTS: Mapping[str, Callable[[Sequence[Release], float, str, int], PrivacyBound]] = {
    "pld": _pld,
    "prv": _prv,
    "rdp": _rdp,
}
_FALLBACKS: Mapping[str, tuple[str, ...]] = {"prv": ("pld", "rdp"), "pld": ("rdp",), "rdp": ()}
ACCOUNTANTS = tuple(_ACCOUNTANTS)


def solve_group(curve: PrivacyCurve, order: int, delta: float) -> float:
    """Returns an epsilon at ``delta`` for groups of ``order`` rows.

    It is order * e, for the smallest e that bisection finds with
    delta_1(e) (1 + exp(e) + ... + exp((order-1) e)) <= delta. Order 1 is the row's own guarantee. Every e that meets
    the condition is a valid bound, so rounding in the search cannot make it unsound.
    """

    def met(epsilon: float) -> bool:
        row_delta = curve.delta_at(epsilon)
        return row_delta <= 0 or math.log(row_delta) + _log_group_factor(order, epsilon) <= math.log(delta)

    if met(0.0):
        return 0.0
    low, high = 0.0, 1e-6
    while not met(high):
        low, high = high, high * 4
        if high > _EPSILON_LIMIT:
            raise AccountantFailure(f"no finite epsilon at delta {delta:.3g}, numerical error included")
    while high - low > 1e-5 * high:
        middle = math.sqrt(low * high) if low > 0 else high / 2
        if met(middle):
            high = middle
        else:
            low = middle
        if high < 1e-12:
            break
    return order * high


def least_epsilon(curve: PldCurve, order: int, delta: float) -> float:
    """Returns a lower bound on the composition's true epsilon.

    It is PLD's epsilon less the most that discretising can add. Discretising widens the composed loss by a known share
    of its variance, and changes epsilon by at most that share of epsilon itself and of a few standard deviations; a
    thousandth covers the rest.
    """
    rough = solve_group(curve.optimistic(), order, delta)
    slack = curve.looseness * (2 * rough + 4 * order * curve.deviation) + 1e-3 * rough
    return max(0.0, rough - slack)


def _reject_below(least: float, lower: float, upper: float) -> None:
    if upper < least:
        raise AccountantFailure(
            f"its bracket [{lower_text(lower)}, {upper_text(upper)}] lies below {lower_text(least)}, which the same "
            "releases spend at the least by their privacy loss distributions"
        )


def _log_group_factor(order: int, epsilon: float) -> float:
    """Returns log(1 + exp(e) + ... + exp((order - 1) e)), without overflow."""
    if order == 1:
        return 0.0
    last = (order - 1) * epsilon
    return last + math.log(math.fsum(math.exp(-j * epsilon) for j in range(order)))


def _relation(adjacency: str, rows: int) -> str:
    relation = "add or remove one" if adjacency == ADD_REMOVE else "replace one"
    return f"{relation} {'example' if rows == 1 else f'group of at most {rows} examples'}"


def _validate(accountant: str, delta: float, adjacency: str, rows: int) -> None:
    problems = []
    if accountant not in ACCOUNTANTS:
        problems.append(f"accountant {accountant!r} is unknown; one of {', '.join(ACCOUNTANTS)}.")
    if not 0 < delta < 1:
        problems.append(f"delta {delta} is not in (0, 1): no Gaussian mechanism has one.")
    if adjacency not in ADJACENCIES:
        problems.append(f"adjacency {adjacency!r} is unknown.")
    if rows < 1:
        problems.append(f"max_examples_per_unit {rows} is not positive.")
    if problems:
        raise ValueError(
            "\n".join([*problems, f"HINT: use a delta below 1/N, and as adjacency one of {', '.join(ADJACENCIES)}."])
        )


def answer_by(name: str, releases: Sequence[Release], delta: float, adjacency: str, rows: int) -> PrivacyBound | None:
    """Returns the bound by this accountant itself, or None if it cannot answer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _ACCOUNTANTS[name](releases, delta, adjacency, rows)
        except _LIBRARY_ERRORS:
            return None


# ---- epsilon during a run


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
