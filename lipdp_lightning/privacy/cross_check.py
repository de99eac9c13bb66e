"""A second accountant's opinion of an epsilon, so that the error of one library does not stay unseen."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

from lipdp_lightning.bound_text import upper_text
from lipdp_lightning.privacy.accountants import ADD_REMOVE, REPLACE_ONE, PrivacyBound, get_accountant
from lipdp_lightning.privacy.ledger import LedgerEntry

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
