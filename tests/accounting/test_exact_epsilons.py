"""The accountants against exact epsilons that were computed by other means (exact_epsilons.py)."""

from __future__ import annotations

import math
import warnings
from hashlib import sha256

import pytest
from exact_epsilons import Case, Releases, exact_epsilon, gaussian_epsilon, one_step_epsilon, read_cases

from lipdp_lightning.accounting.accountants import PrivacyBound, answer_by, epsilon_of
from lipdp_lightning.accounting.events import LedgerEntry
from lipdp_lightning.accounting.privacy_curves import PldCurve, collect

CASES = read_cases()
SOUND = 1e-6  # of epsilon: the digits of the truth and of the search for epsilon
TIGHT = 0.01
IN_THE_SAMPLE = 2  # of a hundred cases, chosen by their hash


def in_the_sample(case: Case) -> bool:
    return case in CASES[:4] or int.from_bytes(sha256(repr(case).encode()).digest()[:4], "big") % 100 < IN_THE_SAMPLE


SAMPLE = [case for case in CASES if in_the_sample(case)]
REST = [case for case in CASES if not in_the_sample(case)]


def releases(case: Case) -> list[LedgerEntry]:
    before = [LedgerEntry("gaussian", case.preliminary, 1.0, 1, "statistic")] if case.preliminary else []
    return [*before, LedgerEntry("subsampled_gaussian", case.noise, case.rate, case.steps)]


def bound(case: Case, accountant: str = "pld") -> PrivacyBound:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return epsilon_of(accountant, releases(case), case.delta, case.adjacency, case.rows)


def problem(case: Case, found: PrivacyBound) -> str:
    """Why the answer is wrong; empty if it is not. A group's exact epsilon is only known from below."""
    if found.epsilon < case.epsilon * (1 - SOUND):
        return f"{found} is below the truth of {case}"
    # where double precision or the largest grid give out, the answer may be looser
    roundings = PldCurve.ROUNDING_PER_STEP * max(10, case.steps) > 1e-3 * case.delta
    if case.rows > 1 or found.accountant != "pld" or roundings:
        return ""
    if found.epsilon > case.epsilon * (1 + TIGHT) + 2e-4:
        return f"{found} is far above the truth of {case}"
    return ""


def problems(cases: list[Case]) -> list[str]:
    return [text for case in cases if (text := problem(case, bound(case)))]


def test_pld_is_never_below_the_truth_and_hardly_above() -> None:
    assert len(SAMPLE) > 4
    assert problems(SAMPLE) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_pld_on_the_whole_grid(part: int) -> None:
    assert problems(REST[part::8]) == []


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_the_others_are_never_below_the_truth(accountant: str) -> None:
    low = [case for case in CASES if bound(case, accountant).epsilon < case.epsilon * (1 - SOUND)]
    assert low == []


@pytest.mark.slow
def test_a_replacement_as_a_group_of_two_is_never_below_the_truth() -> None:
    """RDP answers where PLD cannot."""
    cases = [case for case in CASES if case.adjacency == "replace_one"]
    low = []
    for case in cases:
        found = answer_by("rdp", collect(releases(case)), case.delta, case.adjacency, case.rows)
        if found is not None and found.epsilon < case.epsilon * (1 - SOUND):
            low.append(case)
    assert len(cases) > 100 and low == []


def test_a_bracket_of_prv_that_contradicts_pld_is_rejected() -> None:
    """A run of the grid for which the library's bracket lies below the truth."""
    for case in CASES[:1]:
        with pytest.warns(UserWarning, match=r"prv failed: its bracket .* lies below .*: epsilon is from pld"):
            found = epsilon_of("prv", releases(case), case.delta)
        assert found.accountant == "pld" and found.epsilon >= case.epsilon


def test_the_grid_has_the_extremes() -> None:
    assert len(CASES) >= 400
    assert {c.adjacency for c in CASES} == {"add_remove", "replace_one"}
    assert min(c.noise for c in CASES) < 0.4 and max(c.noise for c in CASES) > 40
    assert min(c.rate for c in CASES) < 1e-3 and sum(c.rate == 1 for c in CASES) > 20
    assert {c.steps for c in CASES} >= {1, 2} and max(c.steps for c in CASES) > 150_000
    assert min(c.delta for c in CASES) <= 1e-12 and max(c.delta for c in CASES) >= 1e-3
    assert {c.rows for c in CASES} == {1, 2, 3, 6} and sum(c.preliminary > 0 for c in CASES) > 50
    assert min(c.epsilon for c in CASES) < 0.05 and max(c.epsilon for c in CASES) > 100


# ---- the truth itself, against closed forms


def test_the_integral_agrees_with_closed_forms() -> None:
    one = Case("replace_one", 0.3, 1.0, 1, 1e-6)
    assert Releases(one, "REPLACE", 3001).epsilon() == pytest.approx(
        one_step_epsilon("REPLACE", 0.3, 1.0, 1e-6), rel=1e-8
    )
    full = Case("add_remove", 1.0, 30.0, 1000, 1e-12)
    exact = gaussian_epsilon(math.sqrt(1000) / 30, 1e-12)
    assert Releases(full, "REMOVE", 3001).epsilon() == pytest.approx(exact, rel=1e-10)
    joined = Case("replace_one", 1.0, 30.0, 1000, 1e-9, 2, 4.0)
    mu = math.sqrt(1000 * (4 / 30) ** 2 + (4 / 4.0) ** 2)
    assert exact_epsilon(joined) == pytest.approx(gaussian_epsilon(mu, 1e-9), rel=1e-10)


@pytest.mark.slow
def test_the_stored_truths_are_what_the_script_computes() -> None:
    for case in CASES[::40]:
        again = exact_epsilon(Case(**{**vars(case), "epsilon": 0.0}))
        assert again == pytest.approx(case.epsilon, rel=1e-7)
