"""A killed private selection: whenever it is killed, no trial is compared that is drawn again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from lipdp_lightning.tuning import private, search
from lipdp_lightning.tuning.objectives import OBJECTIVES
from lipdp_lightning.tuning.private import BestTrial, PrivateSelection, select
from lipdp_lightning.tuning.search import Search
from lipdp_lightning.tuning.selection import TrialCount
from lipdp_lightning.tuning.space import Range

TRIALS = 3


class Killed(BaseException):
    """The process is gone: nothing after it runs."""


class Trainings:
    """Trainings whose results get better and better, so that a draw too many would be released."""

    def __init__(self) -> None:
        self.drawn = 0

    def prepare(self, config: Any, params: Any) -> Any:
        plan = SimpleNamespace(events=tuple, certified=True)
        trainer = SimpleNamespace(callbacks=[])
        return SimpleNamespace(plan=plan, run=self._run, experiment=SimpleNamespace(trainer=trainer))

    def _run(self) -> Any:
        self.drawn += 1
        strategy = SimpleNamespace(statistics=SimpleNamespace(values={}))
        module = SimpleNamespace(trainer=SimpleNamespace(strategy=strategy), state_dict=lambda: {"draw": self.drawn})
        metrics = {"validation/accuracy": self.drawn / 100}
        return SimpleNamespace(metrics=metrics, module=module, epsilon=1.0, plan=SimpleNamespace(events=tuple))


class Points:
    """Counts what happens between a training and its end on record, before and after each; kills at one of them."""

    def __init__(self, patch: pytest.MonkeyPatch, kill_at: int | None) -> None:
        self.passed, self.kill_at = 0, kill_at
        for owner, name in (
            (BestTrial, "propose"), (BestTrial, "settle"), (private.os, "replace"), (private.torch, "save"),
            (optuna.trial.Trial, "set_user_attr"), (optuna.study.Study, "tell"), (optuna.study.Study, "ask"),
        ):  # fmt: skip
            patch.setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self._pass()
            value = original(*arguments, **options)
            self._pass()
            return value

        return call

    def _pass(self) -> None:
        self.passed += 1
        if self.passed == self.kill_at:
            raise Killed


@pytest.fixture
def study() -> Iterator[optuna.Study]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    made = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler())
    made.set_user_attr("number of trials", TRIALS)
    yield made


def session(study: optuna.Study, folder: Path, trainings: Trainings, kill_at: int | None) -> int:
    """One start of the search, as `lipdp tune` does it; how many points it passed."""
    selection = PrivateSelection(TrialCount(1.0, 0.3), OBJECTIVES["accuracy"], None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "prepare", trainings.prepare)
        points = Points(patch, kill_at)
        try:
            own = Search(study, {}, {"lr": Range(0.1, 1.0)}, [OBJECTIVES["accuracy"]])
            own.take_back_interrupted()
            select(own, selection, BestTrial(folder / "best.pt"), None, [()])
        except Killed:
            pass
    return points.passed


def one_draw_for_each_trial(study: optuna.Study, folder: Path) -> bool:
    """Each of K trials has ended once, and the best of exactly these is what would be released."""
    complete = [t for t in study.trials if t.state == optuna.trial.TrialState.COMPLETE]
    best = BestTrial(folder / "best.pt").content()
    scores = {t.number: t.values[0] for t in complete}
    return (
        len(complete) == TRIALS
        and best["trial"] in scores
        and best["score"] == max(scores.values()) == scores[best["trial"]]
    )


def test_a_search_that_is_not_killed(study: optuna.Study, tmp_path: Path) -> None:
    trainings = Trainings()
    session(study, tmp_path, trainings, None)
    assert one_draw_for_each_trial(study, tmp_path) and trainings.drawn == TRIALS
    assert {file.name for file in tmp_path.iterdir()} == {"best.pt"}


@pytest.mark.parametrize("first", range(10))
def test_a_kill_at_any_point_gives_no_trial_a_second_draw(first: int, tmp_path: Path) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    (tmp_path / "count").mkdir()
    counted = optuna.create_study(direction="maximize")
    counted.set_user_attr("number of trials", TRIALS)
    points = session(counted, tmp_path / "count", Trainings(), None)
    assert points > 30
    for kill_at in range(1 + first, points + 1, 10):
        folder = tmp_path / str(kill_at)
        folder.mkdir()
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler())
        study.set_user_attr("number of trials", TRIALS)
        trainings = Trainings()
        session(study, folder, trainings, kill_at)
        trainings.drawn -= 50 * (kill_at % 20 < 10)  # an earlier draw may be the best one or not
        session(study, folder, trainings, None)
        assert one_draw_for_each_trial(study, folder), f"killed at point {kill_at} of {points}"


def test_a_comparison_before_the_record_fails_the_same_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: the best trial was chosen while the trial still counted as running."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    propose, settle = BestTrial.propose, BestTrial.settle

    def at_once(self: BestTrial, *arguments: Any) -> None:
        propose(self, *arguments)
        settle(self, lambda trial: True)

    monkeypatch.setattr(BestTrial, "propose", at_once)
    failed = []
    for kill_at in range(1, 40):
        folder = tmp_path / str(kill_at)
        folder.mkdir()
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler())
        study.set_user_attr("number of trials", TRIALS)
        trainings = Trainings()
        session(study, folder, trainings, kill_at)
        # the later draws of this one are worse, so that the draw too many stays the best
        trainings.drawn -= 50
        session(study, folder, trainings, None)
        failed.append(not one_draw_for_each_trial(study, folder))
    assert any(failed)
