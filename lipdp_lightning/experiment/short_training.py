"""Runs short trainings in this process, with the engine and the accounting of ``lipdp fit``, and writes no file.

A table of hundreds of trainings would otherwise spend most of its time on calibrating the same noise, reading the same
data, validating, and writing reports.
"""

from __future__ import annotations

import copy
import gc
import math
import signal
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import lightning
import yaml

from ..accounting.accountants import epsilon_of
from ..accounting.events import LedgerEntry
from ..data_modules.base import PrivateDataModule
from ..privacy.plan import PrivacyPlan
from ..training.module import PrivateModule
from ..training.settings import PrivacySettings
from ..training.strategy import PrivateStrategy
from .config_file import check_config_file
from .experiment import DEFAULTS, Experiment, make_experiment
from .held_out import held_out_metrics
from .quiet import quiet

KEPT_DATA_SETS = 4
KEPT_BYTES = 1 << 30  # limit on kept rows that are not in use


@dataclass(frozen=True)
class Result:
    """The result of a training.

    ``epsilon`` is the guarantee of the planned steps at ``plan.delta``, with what callbacks release beside them; it is
    infinite if nothing is guaranteed. Metrics are those of held-out rows, which it does not cover. ``warnings`` are the
    one-line warnings of this run.
    """

    metrics: dict[str, float]
    epsilon: float
    certified: bool
    seconds: float
    steps: int
    plan: PrivacyPlan
    module: PrivateModule = field(repr=False)
    warnings: tuple[str, ...] = ()

    @property
    def score(self) -> float:
        """The headline metric: test before validation, accuracy before mean absolute error."""
        names = [f"{stage}/{kind}" for stage in ("test", "validation") for kind in ("accuracy", "mae")]
        return next((self.metrics[n] for n in names if n in self.metrics), math.nan)


def run_once(
    config: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    secret: bytes | None = None,
) -> Result:
    """Trains the configuration with the overrides ({"privacy.epsilon": 1.0, ...}), then evaluates on held-out rows.

    Calibrated noise, bounds on epsilon and the data sets last used are kept for the process.

    Args:
        config: a YAML file, or its content.
        overrides: dotted keys and their values; a mapping given as a value replaces the whole value.
        secret: 16 bytes that fix sampling and noise, so that a benchmark on public data can be repeated. Whoever knows
            them can remove the noise: leave them out if the data is private.

    Returns:
        Metrics, guarantee and plan of the training.
    """
    return prepare(config, overrides, secret=secret).run()


@dataclass(frozen=True)
class Prepared:
    """A training that is ready to take its steps: what it would release is known, and nothing has been released."""

    experiment: Experiment
    warnings: tuple[str, ...]

    @property
    def plan(self) -> PrivacyPlan:
        return self.experiment.plan

    def run(self) -> Result:
        """Trains and evaluates; to be called once."""
        experiment = self.experiment
        return _trained(experiment.trainer, experiment.model, experiment.datamodule, self.warnings)


def prepare(
    config: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None, *, secret: bytes | None = None
) -> Prepared:
    """Returns the training that ``run_once`` would run."""
    experiment, caught = _quietly(lambda: _experiment(merged(config, overrides or {})))
    strategy = experiment.trainer.strategy
    assert isinstance(strategy, PrivateStrategy)
    strategy.fixed_secret = secret
    return Prepared(experiment, tuple(caught))


def train(
    module: PrivateModule,
    data: PrivateDataModule,
    plan: PrivacyPlan,
    *,
    secret: bytes | None = None,
    physical_batch_size: int | None = None,
    **trainer_options: Any,
) -> Result:
    """Trains objects made in Python as ``run_once`` does; the module holds its own optimizer."""
    strategy = PrivateStrategy(plan, physical_batch_size=physical_batch_size, fixed_secret=secret)
    options: dict[str, Any] = {**DEFAULTS, **_LEAN["trainer"], "accelerator": "cpu", "devices": 1, **trainer_options}
    options |= {"max_steps": options.get("max_steps", plan.steps), "max_epochs": -1, "strategy": strategy}
    trainer, caught = _quietly(lambda: lightning.Trainer(**options))
    return _trained(trainer, module, data, caught)


def merged(config: str | Path | Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a configuration with dotted keys replaced."""
    content: Any = copy.deepcopy(dict(config)) if isinstance(config, Mapping) else _content(Path(config))
    for key, value in overrides.items():
        place: Any = content
        *path, last = key.split(".")
        for name in path:
            if place.get(name) is None:
                place[name] = {}
            place = place[name]
            if not isinstance(place, dict):
                raise ValueError(f"{key}: {name} is {place!r} and has no keys. HINT: set {name} as a whole.")
        place[last] = value
    return dict(content)


def _content(path: Path) -> dict[str, Any]:
    check_config_file(path)
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    return content


_LEAN: dict[str, Any] = {
    "trainer": {
        "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False,
    }
}  # fmt: skip


class LeanExperiment(Experiment):
    """Uses callbacks of the configuration only, with noise and data sets from memory."""

    _known_noise: float | None = None

    @property
    def settings(self) -> PrivacySettings:
        settings = super().settings
        return settings if self._known_noise is None else settings.with_noise(self._known_noise)

    def make_plan(self) -> PrivacyPlan:
        self.datamodule = _known_data(yaml.safe_dump(self.config["data"].as_dict()), self.datamodule)
        settings, data = self.settings, self.datamodule
        if settings.epsilon is not None:
            budget = repr((settings.budget(), data.dataset_size, data.preliminary))
            self._known_noise = _noise_for(_Keyed(budget, super().make_plan))
        return super().make_plan()

    def _callbacks(self, given: list[Any], options: dict[str, Any]) -> list[Any]:
        return given


def _experiment(content: dict[str, Any]) -> LeanExperiment:
    content["trainer"] = {**(content.get("trainer") or {}), **_LEAN["trainer"]}
    experiment = make_experiment(LeanExperiment, ["--config", yaml.safe_dump(content)], None, "off")
    assert isinstance(experiment, LeanExperiment)
    return experiment


class _Keyed:
    """A value that is found again by its key."""

    def __init__(self, key: str, value: Any) -> None:
        self.key, self.value = key, value

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and other.key == self.key


_kept_data: dict[str, PrivateDataModule] = {}


def _known_data(key: str, fresh: PrivateDataModule) -> PrivateDataModule:
    """Returns the data of that description, with their rows if they were used lately and fit into memory."""
    data = _kept_data.pop(key, fresh)
    room, kept = KEPT_BYTES, {key: data}
    for name, other in reversed(_kept_data.items()):
        room -= _bytes_in_memory(other)
        if room >= 0 and len(kept) < KEPT_DATA_SETS:
            kept[name] = other
    if dropped := len(kept) <= len(_kept_data):
        _kept_data.clear()
    _kept_data.update(reversed(kept.items()))
    if dropped:
        gc.collect()  # data modules and the trainers they were used by refer to each other
    return data


def _bytes_in_memory(data: PrivateDataModule) -> int:
    parts = {id(rows): rows for rows in (data._train, data._validation, data._test) if rows is not None}
    return 0 if data.mapped else sum(rows.x.nbytes for rows in parts.values())


@lru_cache(maxsize=4096)
def _noise_for(budget: _Keyed) -> float:
    """Returns the noise multiplier of a budget, calibrated once for all plans that ask for the same."""
    plan: PrivacyPlan = budget.value()
    return plan.noise_multiplier


@lru_cache(maxsize=4096)
def _bound(events: tuple[LedgerEntry, ...], accountant: str, delta: float, adjacency: str, rows: int) -> float:
    return epsilon_of(accountant, events, delta, adjacency, rows).epsilon


def guarantee(plan: PrivacyPlan) -> float:
    """Returns the epsilon of a plan's steps, infinite without a certificate, computed once per process."""
    if not plan.certified:
        return math.inf
    return _bound(plan.events(), plan.accountant, plan.delta, plan.adjacency, plan.max_examples_per_unit)


def beside_training(trainer: lightning.Trainer) -> float:
    """Returns the epsilon of what callbacks release beside the plan's steps; basic composition adds it to theirs."""
    from ..callbacks.temperature_scaling import planned_beside_training

    return planned_beside_training(trainer)


def _trained(
    trainer: lightning.Trainer, module: PrivateModule, data: PrivateDataModule, caught: Sequence[str]
) -> Result:
    strategy = trainer.strategy
    assert isinstance(strategy, PrivateStrategy) and strategy.plan is not None
    start = time.perf_counter()

    def fit_and_test() -> dict[str, float]:
        # validation is left to the end
        validation_batches, trainer.limit_val_batches = trainer.limit_val_batches, 0
        trainer.fit(module, datamodule=data)
        trainer.limit_val_batches = validation_batches
        trained = copy.deepcopy(module.state_dict())
        metrics = held_out_metrics(trainer, module, data)
        module.load_state_dict(trained)  # a metric or a callback may have put held-out rows into the module
        return metrics

    with _interruptible():
        metrics, more = _quietly(fit_and_test)
    seconds = time.perf_counter() - start
    said, plan = tuple(dict.fromkeys([*caught, *more])), strategy.plan  # set-up may have settled the scaling
    steps = trainer.global_step
    epsilon = guarantee(plan) + beside_training(trainer)
    return Result(metrics, epsilon, plan.certified, seconds, steps, plan, module, said)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Lets the caller decide about Ctrl-C, which Lightning answers by ignoring further ones and ending the process."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as ended:
        if not isinstance(ended.__context__, KeyboardInterrupt):
            raise
        signal.signal(signal.SIGINT, before)
        raise KeyboardInterrupt from None


def _quietly(action: Any) -> tuple[Any, list[str]]:
    """Returns the action's value and its warnings, which are not printed."""
    found: list[str] = []

    def keep(message: Warning | str, *_: Any, **__: Any) -> None:
        found.append(" ".join(str(message).split()))

    with quiet():
        warnings.showwarning = keep  # restored by the context
        return action(), found
