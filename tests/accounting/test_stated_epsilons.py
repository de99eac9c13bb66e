"""The epsilons that a run states, against exact ones: under way, for groups, for replace-one, over several branches."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from exact_epsilons import Case, exact_epsilon, gaussian_epsilon, read_cases
from small_runs import Crash, fit, make_module, make_plan

import lipdp_lightning
from lipdp_lightning.accounting import accountants
from lipdp_lightning.accounting.accountants import (
    PrivacyBound,
    Spending,
    epsilon_of,
)
from lipdp_lightning.accounting.events import LedgerEntry
from lipdp_lightning.accounting.privacy_curves import ADD, PldCurve, PrvCurve
from lipdp_lightning.budget import calibrate
from lipdp_lightning.budget.calibrate import (
    AccountantDisagreementWarning,
    calibrate_noise,
    privacy_bound,
    warn_of_disagreement,
)
from lipdp_lightning.callbacks import PrivacyAccountant, PrivacyReport, ResumeCheckpoint
from lipdp_lightning.cli import main
from lipdp_lightning.commands.budget_question import compute_budget, format_table
from lipdp_lightning.mechanism.step import Mechanism
from lipdp_lightning.privacy.plan import PrivacyPlan
from lipdp_lightning.studies.reproduce.reaccounting import steps_for

ROUNDING = 1 - 1e-6

# ---- which accountant answers


@pytest.mark.parametrize(
    "function", [PrivacyPlan, PrivacyPlan.create, calibrate_noise, privacy_bound, steps_for, compute_budget]
)
def test_pld_answers_where_nobody_names_an_accountant(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    if "accountant" in parameters:
        assert parameters["accountant"].default == "pld"
    else:
        plan = function(dataset_size=1000, expected_batch_size=50, steps=10, epsilon=2.0, delta=1e-5)
        assert plan.accountant == "pld"


def test_pld_answers_for_a_question_on_the_command_line() -> None:
    words = "--dataset-size 1000 --batch-size 50 --steps 10 --delta 1e-5 --noise-multiplier 1 --json"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["budget", *words.split()]) == 0
    assert json.loads(out.getvalue())["accountant"] == "pld"


# ---- under way


def full_batch(**options: Any) -> PrivacyPlan:
    return make_plan(
        **{"expected_batch_size": 60, "noise_multiplier": 25.0, "accountant": "pld", "steps": 40} | options
    )


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(("adjacency", "shift"), [("add_remove", 1), ("replace_one", 2)])
def test_every_epsilon_that_is_shown_is_at_least_the_exact_one(accountant: str, adjacency: str, shift: int) -> None:
    """On the full batch t steps are one Gaussian; a replaced row moves the sum by two rows' worth."""
    spending = Spending(full_batch(adjacency=adjacency, accountant=accountant), points=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for steps in (1, 2, 5, 6, 21, 39, 40, 41, 55):
            exact = gaussian_epsilon(shift * math.sqrt(steps) / 25, 1e-3)
            assert spending.shown(steps) >= exact * ROUNDING
            assert spending.exactly(steps).epsilon >= exact * ROUNDING
        exact = gaussian_epsilon(shift * math.sqrt(40) / 25, 1e-3)
        loosest = 1.01 if accountant == "pld" or shift == 2 else 1.35
        assert exact * ROUNDING <= spending.guarantee().epsilon <= loosest * exact


def test_the_guarantee_under_replace_one_of_a_subsampled_run() -> None:
    reference = next(c for c in read_cases() if c.adjacency == "replace_one" and c.steps == 14062)
    plan = make_plan(
        dataset_size=60000, expected_batch_size=256, noise_multiplier=1.1, steps=14062, delta=1e-5, accountant="pld",
        adjacency="replace_one",
    )  # fmt: skip
    stated = Spending(plan).guarantee().epsilon
    assert reference.epsilon * ROUNDING <= stated <= 1.01 * reference.epsilon
    half = exact_epsilon(Case("replace_one", plan.sample_rate, 1.1, 7031, 1e-5))
    assert half * ROUNDING <= Spending(plan).shown(7031) <= 1.02 * half


def test_statistics_and_no_step_at_all() -> None:
    plan = full_batch(preliminary=(("mean", 4.0),))
    assert Spending(plan).shown(0) >= gaussian_epsilon(1 / 4, 1e-3) * ROUNDING
    assert Spending(full_batch()).shown(0) == 0.0


# ---- calibration


@pytest.mark.parametrize("rows", [2, 5])
@pytest.mark.parametrize(("adjacency", "shift"), [("add_remove", 1), ("replace_one", 2)])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.filterwarnings("ignore::lipdp_lightning.budget.calibrate.AccountantDisagreementWarning")
def test_noise_for_a_group_protects_all_its_rows(rows: int, adjacency: str, shift: int, accountant: str) -> None:
    """The rows of one unit may all point one way, and on the full batch all of them are there."""
    noise, bound = calibrate_noise(2.0, 1e-4, 1.0, 10, accountant, adjacency, rows)
    exact = gaussian_epsilon(rows * shift * math.sqrt(10) / noise, 1e-4)
    assert exact <= bound.epsilon <= 2.0
    assert exact > 0.15  # the group property is loose, but not without bounds
    plan = PrivacyPlan.create(
        dataset_size=100, expected_batch_size=100, steps=10, epsilon=2.0, delta=1e-4, accountant=accountant,
        adjacency=adjacency, unit="group", max_examples_per_unit=rows,
    )  # fmt: skip
    assert gaussian_epsilon(rows * shift * math.sqrt(10) / plan.noise_multiplier, 1e-4) <= 2.0
    steps = steps_for(2.0, 1e-4, 1.0, 200.0, accountant, adjacency, rows)
    assert gaussian_epsilon(rows * shift * math.sqrt(steps) / 200, 1e-4) <= 2.0


# ---- two accountants


def calibrated_warnings(*arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calibrate_noise(*arguments)
    return [str(w.message) for w in caught if w.category is AccountantDisagreementWarning]


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_accountants_that_agree_say_nothing(adjacency: str) -> None:
    assert calibrated_warnings(3.0, 1e-5, 0.02, 200, "pld", adjacency) == []


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_an_accountant_that_errs_is_contradicted(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Discretised losses that are a tenth too small, or too large: both numbers are in the warning."""
    right = PldCurve.delta_at
    monkeypatch.setattr(PldCurve, "delta_at", lambda self, epsilon: right(self, epsilon / share))
    (text,) = calibrated_warnings(3.0, 1e-5, 0.02, 200, "pld")
    stated, other = (float(number) for number in re.findall(r"(\d+\.?\d*) by (?:pld|prv|rdp)", text))
    assert stated / other == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_no_statement_counts_a_replacement_as_two_examples(accountant: str) -> None:
    """Budgets, calibrated noise, guarantees and what is shown on the way are those of PLD."""
    assert calibrated_warnings(3.0, 1e-5, 0.02, 200, accountant, "replace_one") == []
    settings = (1.0, 1e-5, 0.01, 200)
    tight = epsilon_of("pld", [LedgerEntry("subsampled_gaussian", 1.0, 0.01, 200)], 1e-5, "replace_one").epsilon
    (row,) = compute_budget(
        1000, 10, 1e-5, steps=200, noise_multipliers=[1.0], accountant=accountant, adjacency="replace_one"
    )
    assert (row.epsilon, row.accountant) == (tight, "pld")
    assert "whichever accountant is named" in format_table([row])
    spent, named = (
        Spending(make_plan(adjacency="replace_one", accountant=name, noise_multiplier=1.0, steps=200))
        for name in ("pld", accountant)
    )
    assert [named.shown(steps) for steps in (1, 60, 200)] == [spent.shown(steps) for steps in (1, 60, 200)]
    assert named.guarantee().epsilon == spent.guarantee().epsilon
    noises = [calibrate_noise(2.0, *settings[1:], name, "replace_one")[0] for name in ("pld", accountant)]
    assert noises[0] == noises[1]


def test_without_the_prv_package_everything_else_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prv_accountant", None)
    entry = LedgerEntry("subsampled_gaussian", 1.0, 0.02, 200)
    with pytest.warns(UserWarning, match=r"prv-accountant cannot be imported .*: epsilon is from pld"):
        bound = epsilon_of("prv", [entry], 1e-5)
    assert bound.accountant == "pld" and bound.epsilon == epsilon_of("pld", [entry], 1e-5).epsilon
    assert calibrated_warnings(3.0, 1e-5, 0.02, 200, "pld") == []
    asked: list[str] = []
    answer_by = calibrate.answer_by
    monkeypatch.setattr(calibrate, "answer_by", lambda name, *rest: asked.append(name) or answer_by(name, *rest))
    warn_of_disagreement(bound, [entry], 1e-5)
    assert asked == ["prv", "rdp"]


def test_a_bracket_that_is_too_low_is_not_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    entry, right = LedgerEntry("subsampled_gaussian", 1.0, 0.02, 200), PrvCurve.bracket
    monkeypatch.setattr(PrvCurve, "bracket", lambda self, delta: tuple(0.99 * end for end in right(self, delta)))
    with pytest.warns(UserWarning, match="lies below"):
        assert epsilon_of("prv", [entry], 1e-5).accountant == "pld"
    monkeypatch.undo()
    assert epsilon_of("prv", [entry], 1e-5).accountant == "prv"


def test_an_answer_for_a_group_that_is_too_low_is_not_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """With little noise and few draws, a removed row shows far more than an added one, which PLD bounds."""
    entry, right = LedgerEntry("subsampled_gaussian", 0.8, 0.02, 5), PrvCurve.delta_at
    monkeypatch.setattr(PrvCurve, "delta_at", lambda self, epsilon: 1e-6 * right(self, epsilon))
    with pytest.warns(UserWarning, match="lies below"):
        bound = epsilon_of("prv", [entry], 1e-5, max_examples_per_unit=2)
    assert bound.accountant == "pld"
    assert bound.epsilon >= epsilon_of("pld", [entry], 1e-5, max_examples_per_unit=2).epsilon
    monkeypatch.undo()
    assert epsilon_of("prv", [entry], 1e-5, max_examples_per_unit=2).accountant == "prv"


@pytest.mark.parametrize("rows", [1, 2])
def test_prv_states_no_less_than_pld_does_for_an_added_row(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PRV accounts for a removed row alone. Here, an added one is made to cost three times as much."""
    entry, curve = LedgerEntry("subsampled_gaussian", 1.0, 0.02, 200), PldCurve

    def dear(releases: Any, direction: str) -> Any:
        found = curve(releases, direction)
        if direction == ADD:
            right = found.delta_at
            found.delta_at = lambda epsilon: right(epsilon / 3)  # type: ignore[method-assign]
        return found

    stated = epsilon_of("prv", [entry], 1e-5, max_examples_per_unit=rows).epsilon
    monkeypatch.setattr(accountants, "PldCurve", dear)
    bound = epsilon_of("prv", [entry], 1e-5, max_examples_per_unit=rows)
    assert bound.accountant == "prv" and bound.epsilon > 1.3 * stated


def test_no_disagreement_over_nothing() -> None:
    nothing = PrivacyBound(0.0, 0.0, 0.0, "pld", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_disagreement(nothing, [], 1e-5)


# ---- several branches


def test_a_report_of_several_branches_states_what_all_of_them_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are counted where noise is added; on the full batch their exact epsilon is that of one Gaussian."""
    released: list[int] = []
    step = Mechanism.privatize_

    def counting(self: Mechanism, *arguments: Any, **options: Any) -> Any:
        released.append(1)
        return step(self, *arguments, **options)

    monkeypatch.setattr(Mechanism, "privatize_", counting)
    plan = full_batch(steps=200)
    run = tmp_path / "run"
    run.mkdir()

    def session(rate: float, crash: int | None, checkpoint: Path | None) -> Any:
        keeper = ResumeCheckpoint(run / "checkpoints", every_n_steps=3)
        ends = [] if crash is None else [Crash(crash)]
        callbacks = (PrivacyAccountant(), *ends, keeper, PrivacyReport(run))
        return fit(
            plan, *callbacks, directory=run, checkpoint=checkpoint, module=make_module(rate=rate),
            trainer_options={"max_steps": 20},
        )  # fmt: skip

    with pytest.raises(InterruptedError):
        session(0.1, 8, None)
    session(0.01, None, run / "checkpoints" / "last.ckpt")  # another learning rate: a branch with noise of its own
    content = json.loads((run / "privacy_report.json").read_text())
    exact = gaussian_epsilon(math.sqrt(len(released)) / 25, plan.delta)
    alone = gaussian_epsilon(math.sqrt(20) / 25, plan.delta)
    assert len(released) > 20 and content["steps_taken"] >= len(released)
    assert content["epsilon_taken"] >= exact > 1.05 * alone
    assert content["epsilon_taken"] == pytest.approx(
        gaussian_epsilon(math.sqrt(content["steps_taken"]) / 25, plan.delta), rel=0.01
    )
    assert content["epsilon"] >= gaussian_epsilon(math.sqrt(200) / 25, plan.delta) * ROUNDING
    page = (run / "privacy_report.md").read_text()
    printed = re.search(r"steps taken account for epsilon = ([\d.]+),", page)
    assert printed is not None and float(printed.group(1)) >= content["epsilon_taken"]
    assert f"branches of this run count together: {content['steps_taken']} steps" in page


def test_the_report_says_which_accountant_answered_for_a_replacement_and_why(tmp_path: Path) -> None:
    plan = make_plan(adjacency="replace_one", accountant="rdp", steps=3)
    fit(plan, PrivacyAccountant(), PrivacyReport(tmp_path))
    content = json.loads((tmp_path / "privacy_report.json").read_text())
    tight = epsilon_of("pld", plan.events(), plan.delta, "replace_one").epsilon
    assert (content["epsilon"], content["accountant"]) == (tight, "pld")
    assert any("rdp knows add/remove only" in note for note in content["notes"])


# ---- one function

COMPUTES = {"PldCurve", "PrvCurve", "RdpCurve", "solve_group", "answer_by", "get_epsilon", "get_epsilon_for_delta"}
APART = {
    "budget/calibrate.py": "a second accountant's answer, to warn where it differs",
    "audit/optimistic_epsilon.py": "a lower estimate that a plan's epsilon is compared with",
    "audit/confidence.py": "what an attack has shown",
    "studies/pure/mixed_ledger.py": "Laplace noise and choices, which no run releases",
    "tuning/selection.py": "a theorem about Renyi divergences, not a composition",
}


def computing_modules(folder: Path) -> set[str]:
    """Modules outside the room of the accountants that compute an epsilon without `epsilon_of`."""
    root = Path(lipdp_lightning.__file__).parent
    found = set()
    for path in folder.rglob("*.py"):
        names = {getattr(n, "id", getattr(n, "attr", None)) for n in ast.walk(ast.parse(path.read_text("utf-8")))}
        if names & COMPUTES and path.parent.name != "accounting":
            found.add(path.relative_to(root if path.is_relative_to(root) else folder).as_posix())
    return found


def test_every_stated_epsilon_comes_from_one_function(tmp_path: Path) -> None:
    root = Path(lipdp_lightning.__file__).parent
    assert computing_modules(root) == set(APART)
    assert not computing_modules(root.parent / "callbacks") and not computing_modules(root.parent / "data_modules")
    (tmp_path / "page.py").write_text("epsilon = RDPAccountant().get_epsilon(delta)")
    assert computing_modules(tmp_path) == {"page.py"}
