"""Runs the search: asks for settings, trains, reports the result, and continues where an earlier session stopped."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..accounting.events import LedgerEntry
from ..bound_text import upper_text
from ..experiment.short_training import Prepared, Result, beside_training, prepare
from .objectives import Objective
from .space import Choice, Range, Space
from .storage import optuna

# settings that do not work raise these errors; any other is a bug and ends the search
_UNSTABLE = (ValueError, ArithmeticError, RuntimeError, FileNotFoundError)
_EVENTS, _ERROR, _METRICS, _CERTIFIED, _VALUES, _BESIDE = (
    *("events", "error", "metrics", "certified", "values", "beside training"),
)


class Search:
    """Trials of a configuration, recorded in a study.

    A trial that raises is recorded as failed, with the reason, and counts, because it may have released steps. The same
    holds for trials of a session that was killed; their settings are tried again.
    """

    def __init__(
        self, study: Any, config: Mapping[str, Any], space: Space, objectives: Sequence[Objective],
        say: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        self.study, self.config, self.space, self.objectives = study, config, space, tuple(objectives)
        self._say = say
        self._distributions = {key: _distribution(entry) for key, entry in space.items()}

    @property
    def finished(self) -> list[Any]:
        """The trials that ended, successfully or not, in order."""
        states = optuna().trial.TrialState
        ended: list[Any] = self.study.get_trials(deepcopy=False, states=(states.COMPLETE, states.FAIL))
        return ended

    @property
    def complete(self) -> list[Any]:
        return [t for t in self.finished if t.state == optuna().trial.TrialState.COMPLETE]

    def has_ended(self, number: int) -> bool:
        """Returns whether the result of a trial is on record, so that it is not tried again."""
        trial = self.study.get_trials(deepcopy=False)[number]
        return trial.state == optuna().trial.TrialState.COMPLETE or _VALUES in trial.user_attrs

    def take_back_interrupted(self) -> int:
        """Counts trials that a killed session left running as failed, and queues their settings for another try.

        Trials whose result is on record have ended and are not tried again. Returns the number of the others.
        """
        running = optuna().trial.TrialState.RUNNING
        trials = self.study.get_trials(deepcopy=False, states=(running,))
        known = [trial for trial in trials if _VALUES in trial.user_attrs]
        left = [trial for trial in trials if _VALUES not in trial.user_attrs]
        for trial in known:
            self.study.tell(trial.number, trial.user_attrs[_VALUES])
        for trial in left:
            self.study._storage.set_trial_user_attr(trial._trial_id, _ERROR, "interrupted")
            self.study.tell(trial.number, state=optuna().trial.TrialState.FAIL)
            if len(trial.params) == len(self.space):
                self.study.enqueue_trial(trial.params)
        return len(left)

    def run(
        self,
        trials: int,
        keep: Callable[[int, Result], None] = lambda number, result: None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Runs until ``trials`` trials have ended; interrupted trials do not count.

        ``keep`` sees every result before it is on record, and ``settle`` is called once it is. Whatever depends on the
        result beyond its trial belongs there, so that no killed session has looked at a trial that is tried again.
        """
        while len([t for t in self.finished if t.user_attrs.get(_ERROR) != "interrupted"]) < trials:
            self._trial(keep, settle)

    def _trial(self, keep: Callable[[int, Result], None], settle: Callable[[], None]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # samplers warn about advice to programmers
            trial = self.study.ask(self._distributions)
        settings = f"trial {trial.number:<4}{_settings(trial.params)}"
        try:
            prepared = prepare(self.config, trial.params)
            self._record_plan(trial, prepared)
            result = prepared.run()
            values = [objective.value(result) for objective in self.objectives]
        except _UNSTABLE as error:
            reason = " ".join(str(error).split())[:500] or type(error).__name__
            trial.set_user_attr(_ERROR, reason)
            self.study.tell(trial, state=optuna().trial.TrialState.FAIL)
            self._say(f"{settings}  failed: {reason[:120]}")
            return
        trial.set_user_attr(_METRICS, {k: v for k, v in result.metrics.items() if k.startswith("validation/")})
        keep(trial.number, result)
        trial.set_user_attr(_VALUES, values)
        settle()
        self.study.tell(trial, values)
        shown = "  ".join(
            f"{o.name} {upper_text(v) if o.metric is None else format(v, '.4g')}"
            for o, v in zip(self.objectives, values, strict=True)
        )
        self._say(f"{settings}  {shown}")

    @staticmethod
    def _record_plan(trial: Any, prepared: Prepared) -> None:
        """Records the plan before the first step, so that the releases of a failing trial are on record."""
        events = [dataclasses.asdict(event) for event in prepared.plan.events()]
        trial.set_user_attr(_EVENTS, events)
        trial.set_user_attr(_BESIDE, beside_training(prepared.experiment.trainer))
        trial.set_user_attr(_CERTIFIED, prepared.plan.certified)


def _settings(params: Mapping[str, Any]) -> str:
    return "  ".join(f"{k.rpartition('.')[2]}={_short(v)}" for k, v in params.items())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _distribution(entry: Range | Choice) -> Any:
    kinds = optuna().distributions
    if isinstance(entry, Choice):
        return kinds.CategoricalDistribution(entry.values)
    if entry.integer:
        return kinds.IntDistribution(int(entry.low), int(entry.high), log=entry.log)
    return kinds.FloatDistribution(entry.low, entry.high, log=entry.log)


def events_of(trial: Any) -> tuple[LedgerEntry, ...] | None:
    """Returns the ledger of a trial, however it ended; None if it never had a plan, and released nothing."""
    events = trial.user_attrs.get(_EVENTS)
    return None if events is None else tuple(LedgerEntry(**event) for event in events)


def beside_of(trial: Any) -> float:
    """Returns the epsilon of a trial's releases that no ledger holds, at delta 0."""
    return float(trial.user_attrs.get(_BESIDE, 0.0))


def error_of(trial: Any) -> str:
    return str(trial.user_attrs.get(_ERROR, ""))


def is_certified(trial: Any) -> bool:
    return bool(trial.user_attrs.get(_CERTIFIED, True))


def front(study: Any, objectives: Sequence[Objective]) -> list[Any]:
    """Returns the trials that no other beats in every objective, the best in the first objective first."""
    states = optuna().trial.TrialState
    done = study.get_trials(deepcopy=False, states=(states.COMPLETE,))
    signs = [1 if o.direction == "minimize" else -1 for o in objectives]
    points = {t.number: [s * v for s, v in zip(signs, t.values, strict=True)] for t in done}

    def beaten(own: list[float]) -> bool:
        return any(all(a <= b for a, b in zip(other, own, strict=True)) and other != own for other in points.values())

    best = [t for t in done if not beaten(points[t.number])]
    return sorted(best, key=lambda t: (points[t.number], t.number))
