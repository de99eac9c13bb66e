"""Epsilon of a ledger at a delta, by three accountants, for add/remove-one and replace-one adjacency.

The number reported (`PrivacyBound.epsilon`) is always an upper bound. Relations (docs/guarantee.md, 1.1, 1.6):

* add_remove: the data sets differ by the presence of one unit (one example, or the rows of one group);
* replace_one: they differ by the value of one unit. PLD accounts for it exactly, with the same noise multiplier.
  RDP and PRV know add/remove only: a replacement is a removal and an addition, a group of two. Halving the
  noise multiplier instead is wrong under subsampling: that pair does not dominate.

Units of at most m rows: the m rows are sampled independently, so the m-fold group property is used, of the
whole composition: if adding or removing (or replacing) one row is (e, d)-DP for one (e, d), then m rows are
(m e, d (1 + exp(e) + ... + exp((m-1) e)))-DP. It holds for every mechanism, and is loose for large m.
"""

from __future__ import annotations

import abc
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

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
# what the accounting libraries raise when their numerics give out
_LIBRARY_ERRORS = (
    AccountantFailure,
    ValueError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
    AssertionError,
    IndexError,
)


class AccountantFallbackWarning(UserWarning):
    """The accountant asked for could not answer; another, equally sound one did."""


@dataclass(frozen=True)
class PrivacyBound:
    """The mechanism is (epsilon, delta)-DP. The smallest true epsilon lies in [lower, upper], upper == epsilon.

    lower is 0 where the accountant gives upper bounds only. accountant is the one that answered.
    """

    epsilon: float
    lower: float
    upper: float
    accountant: str
    note: str


class Accountant(abc.ABC):
    """One interface for the three; `fallbacks` answer, with a warning, when this one cannot."""

    name: ClassVar[str]
    fallbacks: ClassVar[tuple[str, ...]] = ()

    def epsilon(
        self,
        entries: Iterable[LedgerEntry],
        delta: float,
        adjacency: str = ADD_REMOVE,
        max_examples_per_unit: int = 1,
    ) -> PrivacyBound:
        """A certified epsilon at `delta` of everything in the ledger."""
        recorded = [entry for entry in entries if entry.count > 0]
        _validate(delta, adjacency, max_examples_per_unit)
        if not recorded:
            return PrivacyBound(0.0, 0.0, 0.0, self.name, "nothing was released")
        if any(entry.noise_multiplier == 0 for entry in recorded):
            return PrivacyBound(math.inf, math.inf, math.inf, self.name, "a release without noise has no epsilon")
        releases = collect(recorded)
        reasons: list[str] = []
        for name in (self.name, *self.fallbacks):
            try:
                bound = _ACCOUNTANTS[name]()._bound(releases, delta, adjacency, max_examples_per_unit)
            except _LIBRARY_ERRORS as error:
                reasons.append(f"{name} failed: {str(error) or type(error).__name__}")
                continue
            if reasons:
                _warn_fallback(name, reasons)
                note = f"{bound.note}; instead of {self.name} ({'; '.join(reasons)})"
                return PrivacyBound(bound.epsilon, bound.lower, bound.upper, name, note)
            return bound
        raise ValueError(
            f"no accountant can bound epsilon at delta {delta} for {releases}: {'; '.join(reasons)}.\n"
            "HINT: more noise, fewer steps, or a larger delta."
        )

    def _bound(self, releases: Sequence[Release], delta: float, adjacency: str, rows: int) -> PrivacyBound:
        order, method = self._order(adjacency, rows)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # overflow in tails that are then not used
            epsilon = solve_group(self._curve(releases, delta, adjacency, order), order, delta)
        return PrivacyBound(epsilon, 0.0, epsilon, self.name, method)

    def _order(self, adjacency: str, rows: int) -> tuple[int, str]:
        """Group order that turns add/remove of one row into the relation asked for."""
        order = rows if adjacency == ADD_REMOVE else 2 * rows
        return order, f"{self.name}, {_describe(adjacency, rows)}" + (f", group of {order}" if order > 1 else "")

    @abc.abstractmethod
    def _curve(self, releases: Sequence[Release], delta: float, adjacency: str, order: int) -> PrivacyCurve: ...


class RDPAccountant(Accountant):
    """Renyi DP: never fails for want of memory or precision, and is the loosest."""

    name = "rdp"

    def _curve(self, releases: Sequence[Release], delta: float, adjacency: str, order: int) -> PrivacyCurve:
        return RdpCurve(releases)


class PLDAccountant(Accountant):
    """Privacy loss distributions: the default, the tightest, and exact for replace-one."""

    name = "pld"
    fallbacks = ("rdp",)

    def _order(self, adjacency: str, rows: int) -> tuple[int, str]:
        # adding or removing a row is the replacement of a zero contribution: m replacements cover any group
        note = f"pld, {_describe(adjacency, rows)}" + (f", group of {rows}" if rows > 1 else "")
        return rows, note

    def _curve(self, releases: Sequence[Release], delta: float, adjacency: str, order: int) -> PrivacyCurve:
        if adjacency == REPLACE_ONE:
            return PldCurve(releases, REPLACE)
        if all(q == 1 for _, q, _ in releases):
            return PldCurve(releases, REMOVE)  # both directions agree
        return MaximumCurve(PldCurve(releases, REMOVE), PldCurve(releases, ADD))


class PRVAccountant(Accountant):
    """Privacy random variables: a bracket around epsilon, of which the upper end is reported.

    The library accounts for REMOVE only. That ADD is never worse is proven for one step but not for
    compositions, so ADD is bounded by PLD and the larger of the two counts.

    The bracket rests on a mean of the truncated loss that the library finds by one quadrature over a long range. Where
    that misses a part of the loss, the bracket of many steps lies below the truth. An answer that is below what PLD
    allows at the very least is rejected, and PLD answers instead.
    """

    name = "prv"
    fallbacks = ("pld", "rdp")

    def _curve(self, releases: Sequence[Release], delta: float, adjacency: str, order: int) -> PrivacyCurve:
        row_epsilon = solve_group(PldCurve(releases, REMOVE), order, delta) / order
        row_delta = delta / math.exp(_log_group_factor(order, row_epsilon))
        return MaximumCurve(PrvCurve(releases, row_delta, row_epsilon), PldCurve(releases, ADD))

    def _bound(self, releases: Sequence[Release], delta: float, adjacency: str, rows: int) -> PrivacyBound:
        order, method = self._order(adjacency, rows)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            remove = PldCurve(releases, REMOVE)
            least = least_epsilon(remove, order, delta)
        if order > 1:
            bound = super()._bound(releases, delta, adjacency, rows)
            _reject_below(least, 0.0, bound.upper)
            return bound
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            rough = solve_group(remove, 1, delta)
            lower, upper = PrvCurve(releases, delta, rough).bracket(delta)
            _reject_below(least, lower, upper)
            upper = max(upper, solve_group(PldCurve(releases, ADD), 1, delta))
        return PrivacyBound(upper, lower, upper, self.name, f"{method}, upper end of the bracket")


_ACCOUNTANTS: dict[str, type[Accountant]] = {
    "prv": PRVAccountant,
    "pld": PLDAccountant,
    "rdp": RDPAccountant,
}
ACCOUNTANTS = tuple(_ACCOUNTANTS)


def get_accountant(name: str) -> Accountant:
    """The accountant called "prv", "pld" or "rdp"."""
    if name not in _ACCOUNTANTS:
        raise ValueError(f"accountant {name!r} is unknown.\nHINT: one of {', '.join(ACCOUNTANTS)}.")
    return _ACCOUNTANTS[name]()


def solve_group(curve: PrivacyCurve, order: int, delta: float) -> float:
    """An epsilon at `delta` for groups of `order` rows: order * e, for the smallest e that bisection finds with
    delta_1(e) (1 + exp(e) + ... + exp((order-1) e)) <= delta. order 1 is the row's own guarantee.

    Every e that meets the condition is a valid bound, so rounding in the search cannot make it unsound.
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
    """An epsilon that the composition's true one is not below: what PLD gives, less what discretising can add to it.

    Discretising widens the composed loss by a known share of its variance. It moves epsilon by at most that share of
    epsilon itself and of a few standard deviations; a thousandth is left for the rest.
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
    """log(1 + exp(e) + ... + exp((order - 1) e)), without overflow."""
    if order == 1:
        return 0.0
    last = (order - 1) * epsilon
    return last + math.log(math.fsum(math.exp(-j * epsilon) for j in range(order)))


def _describe(adjacency: str, rows: int) -> str:
    relation = "add or remove one" if adjacency == ADD_REMOVE else "replace one"
    return f"{relation} {'example' if rows == 1 else f'group of at most {rows} examples'}"


def _validate(delta: float, adjacency: str, rows: int) -> None:
    problems = []
    if not 0 < delta < 1:
        problems.append(f"delta {delta} is not in (0, 1): no Gaussian mechanism has one.")
    if adjacency not in ADJACENCIES:
        problems.append(f"adjacency {adjacency!r} is unknown.")
    if rows < 1:
        problems.append(f"max_examples_per_unit {rows} is not positive.")
    if problems:
        raise ValueError("\n".join([*problems, f"HINT: delta below 1/N, adjacency one of {', '.join(ADJACENCIES)}."]))


def _warn_fallback(name: str, reasons: Sequence[str]) -> None:
    warnings.warn(f"{'; '.join(reasons)}: epsilon is from {name}.", AccountantFallbackWarning, stacklevel=4)


# ---- a second accountant's opinion, so that the error of one library does not stay unseen

NOTICEABLE = 0.01  # of epsilon


class AccountantDisagreementWarning(UserWarning):
    """Two accountants give epsilons for the same releases that are more than a hundredth apart."""


def warn_of_disagreement(
    bound: PrivacyBound,
    entries: Iterable[LedgerEntry],
    delta: float,
    adjacency: str = ADD_REMOVE,
    max_examples_per_unit: int = 1,
) -> None:
    """Asks another accountant for the same epsilon, and warns with both numbers where they are over 1 % apart.

    PLD is asked about PRV and RDP; PRV is asked about PLD where both account for the relation exactly, and a bracket
    that holds the other number agrees with it. Elsewhere RDP is asked, whose bound is looser by nature: it disagrees
    with PLD only where it is the smaller one.
    """
    if not 0 < bound.epsilon < math.inf:
        return
    recorded, exact = tuple(entries), adjacency == ADD_REMOVE and max_examples_per_unit == 1
    for name in ("pld", "prv", "rdp"):
        if name == bound.accountant or (name == "prv" and not exact):
            continue
        other = _answer_of(name, recorded, delta, adjacency, max_examples_per_unit)
        if other is not None:
            if _apart(bound, other):
                warnings.warn(_text(bound, other, adjacency), AccountantDisagreementWarning, stacklevel=3)
            return


def _apart(bound: PrivacyBound, other: PrivacyBound) -> bool:
    if other.accountant == "rdp" and other.epsilon >= bound.epsilon:
        return False
    low, high = (other.lower, other.upper) if other.lower > 0 else (other.epsilon, other.epsilon)
    gap = max(low - bound.epsilon, bound.epsilon - high)
    return gap > NOTICEABLE * min(bound.epsilon, other.epsilon)


def _answer_of(
    name: str, entries: tuple[LedgerEntry, ...], delta: float, adjacency: str, rows: int
) -> PrivacyBound | None:
    """The bound by this accountant itself; None where another one had to answer for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            bound = get_accountant(name).epsilon(entries, delta, adjacency, rows)
        except ValueError:
            return None
    return bound if bound.accountant == name else None


def _text(bound: PrivacyBound, other: PrivacyBound, adjacency: str) -> str:
    text = (
        f"epsilon is {upper_text(bound.epsilon)} by {bound.accountant} and {upper_text(other.epsilon)} by "
        f"{other.accountant}, for the same releases; the first is what is stated."
    )
    if bound.epsilon < other.epsilon:
        return f"{text}\nHINT: one of them errs; publish the larger one, and report these settings to the project."
    if adjacency == REPLACE_ONE and bound.accountant != "pld":
        text += f" {bound.accountant} knows add/remove only, and pays for a replacement as for two examples."
    return f"{text}\nHINT: accountant {other.accountant}"
