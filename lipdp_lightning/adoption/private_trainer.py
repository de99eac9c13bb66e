"""A Trainer of Lightning whose steps are those of a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning
import yaml
from lightning.pytorch.utilities import rank_zero_info

from ..budget.calibrate import steps_for_epochs
from ..callbacks import PrivacyAccountant, PrivacyReport, ResumeCheckpoint, RunFiles
from ..data_modules.base import PrivateDataModule
from ..experiment.trainer_options import refuse_trainer_options
from ..privacy.branches import Branches
from ..privacy.plan import PrivacyPlan
from ..privacy.statistics import Statistics
from ..training.checkpoints import check_fits
from ..training.claim import claim_run
from ..training.model_checks import optimizers_of
from ..training.run_directory import RunDirectory
from ..training.set_up import refuse, refuse_strategy, steps_per_epoch
from ..training.settings import PrivacySettings
from ..training.step_record import StepRecord
from ..training.strategy import PrivateStrategy
from .adopted_module import AdoptedModule
from .given_rows import AdoptedRows
from .project_strategy import ProjectStrategy

Logged = tuple[tuple[str, ...], tuple[str, ...] | None]
"""The names that a project logs for training rows, and for held-out rows if they are known."""

_LOGGED_ANYWAY = ("epsilon", "nonprivate/loss")
_OWN_STRATEGIES = ("auto", "ddp", "private", None)


class Ledger:
    """A plan, and the record of the steps that were taken of it, for all Trainers of one project.

    Args:
        plan: The plan.
        settings: What the plan leaves open, such as the size of a micro-batch.
        run_dir: The folder of ledger, record, checkpoint and report; None keeps the ledger in memory.
        title: The title of the report.
        scaling_reason: Why the scaling was chosen, if the project left it open.
    """

    def __init__(
        self, plan: PrivacyPlan, settings: PrivacySettings, run_dir: Any, title: str, scaling_reason: str = ""
    ) -> None:
        self.plan, self._settings, self.title, self._scaling_reason = plan, settings, title, scaling_reason
        self.directory = None if run_dir is None else RunDirectory(run_dir)
        self._branches, self._record = Branches(), StepRecord(None)

    def strategy(self) -> PrivateStrategy:
        """Returns a Strategy that takes steps of the plan."""
        folder, settings, strategy = self.directory, self._settings, ProjectStrategy()
        strategy.configure(
            self.plan, settings.physical_batch_size, settings.noise_mode,
            branches=self._branches if folder is None else Branches(folder.ledger),
            record=self._record if folder is None else StepRecord(folder.steps),
            statistics=None if folder is None else Statistics(folder.statistics),
            deterministic=settings.deterministic, tf32=settings.tf32, scaling_reason=self._scaling_reason,
        )  # fmt: skip
        return strategy


class PrivateTrainer(lightning.Trainer):
    """A Trainer with every option of Lightning's, which takes the steps of one plan with ProjectStrategy.

    ``max_epochs`` and ``max_steps`` may ask for fewer steps than the plan has, and never for more. If a run directory
    is given, an unfinished run in it is continued.

    Args:
        ledger: The plan, and what was taken of it.
        notes: What is told when training starts.
        logged: The names that the project logs for training rows, and for held-out rows if they are known.
        options: Options of ``lightning.Trainer``.
    """

    def __init__(self, ledger: Ledger, notes: Sequence[str], logged: Logged, **options: Any) -> None:
        options = {name: value for name, value in options.items() if value is not None or name == "logger"}
        refuse_trainer_options({name: value for name, value in options.items() if name != "strategy"})
        strategy = options.get("strategy")
        if strategy not in _OWN_STRATEGIES:
            raise refuse_strategy(strategy)
        plan, self._notes, self._logged, self._title = ledger.plan, tuple(notes), logged, ledger.title
        self._directory = ledger.directory
        steps = _length(plan, options)
        # an epoch of Lightning's is a whole number of steps, and must not end the run before its last one
        options |= {"max_steps": steps, "max_epochs": math.ceil(steps / steps_per_epoch(plan))}
        options["callbacks"] = [*_listed(options.get("callbacks")), *self._callbacks()]
        options["strategy"] = ledger.strategy()
        options.setdefault("use_distributed_sampler", False)
        super().__init__(**options)

    @property
    def estimated_stepping_batches(self) -> int:
        """The number of steps that the run takes, which schedules such as OneCycleLR need."""
        return int(self.max_steps)

    def fit(self, model: Any, train_dataloaders: Any = None, val_dataloaders: Any = None, datamodule: Any = None,
            ckpt_path: Any = None, weights_only: bool | None = None) -> None:  # fmt: skip
        """Trains; arguments are those of Lightning, and the training rows those that privatize() was given."""
        refuse(_not_private(model, train_dataloaders if datamodule is None else datamodule))
        data = self._data(train_dataloaders, val_dataloaders, datamodule)
        refuse(_problems(self, model, data, self._logged))
        for note in self._notes:
            rank_zero_info(note)
        if self._directory is None:
            super().fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=weights_only)
            return
        checkpoint = self._claim(model, data)
        try:
            super().fit(model, datamodule=data, ckpt_path=ckpt_path or checkpoint, weights_only=False)
            self._report(model)
        finally:
            self._directory.release()

    def _report(self, model: Any) -> None:
        """Writes the report again, with the held-out metrics under the project's own names."""
        found = self.callback_metrics
        metrics = {f"validation/{name}": float(found[name]) for name in self._logged[1] or () if name in found}
        for callback in self.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, PrivacyReport):
                callback.write(self, model, metrics)

    def _data(self, rows: Any, held_out: Any, module: Any) -> Any:
        data = module if module is not None else rows
        if held_out is not None:
            if not isinstance(data, AdoptedRows):
                raise ValueError(
                    "val_dataloaders were given beside data that has its own held-out rows. HINT: leave them out."
                )
            data.hold_out(validation=held_out)
        return data

    def _callbacks(self) -> list[Any]:
        if self._directory is None:
            return [PrivacyAccountant()]
        path = self._directory.path
        resume = ResumeCheckpoint(self._directory.checkpoint.parent)
        return [
            PrivacyAccountant(),
            resume,
            PrivacyReport(path, title=self._title, config=self._config()),
            RunFiles(self._directory, self._config(), self._logged[1] or ()),
        ]

    def _config(self) -> str:
        return yaml.safe_dump({"made_private": list(self._notes)})

    def _claim(self, model: Any, data: Any) -> Any:
        strategy, directory = self.strategy, self._directory
        assert isinstance(strategy, PrivateStrategy) and strategy.plan is not None and directory is not None

        def check() -> None:
            strategy.check(self, model, data)
            if strategy.plan is not None and strategy.plan.certified:
                strategy.spending.guarantee()  # raises where no accountant has a bound

        def fits(saved: Mapping[str, Any]) -> None:
            check_fits(saved, model, optimizers_of(model)[0])

        model.trainer = self  # schedules ask it for the number of steps
        return claim_run(directory, strategy.plan, self.is_global_zero, check, fits, self._config())


def _not_private(model: Any, data: Any) -> list[str]:
    """Returns a problem for the project's own module or data, given in place of what privatize() has returned."""
    hint = "HINT: model, data, Trainer = lipdp_lightning.privatize(model, data, ...), and fit these."
    problems = []
    if not isinstance(model, AdoptedModule):
        problems.append(f"the model is a {type(model).__name__} as it was before privatize(). {hint}")
    if not isinstance(data, PrivateDataModule):
        problems.append(f"the data is a {type(data).__name__} as it was before privatize(). {hint}")
    return problems


def _length(plan: PrivacyPlan, options: Mapping[str, Any]) -> int:
    """Returns the number of steps to take; raises ValueError if the options ask for more than the plan has."""
    steps, epochs = options.get("max_steps", -1), options.get("max_epochs", -1)
    wanted = [steps] if steps >= 0 else []
    if epochs >= 0:
        wanted.append(steps_for_epochs(epochs, plan.dataset_size, plan.expected_batch_size) if epochs else 0)
    if wanted and min(wanted) > plan.steps:
        asked = f"max_epochs={epochs}" if epochs >= 0 else f"max_steps={steps}"
        raise ValueError(
            f"the Trainer is asked for {asked}, which is {min(wanted)} steps, and the noise is calibrated to "
            f"{plan.steps}. HINT: give privatize() the epochs that you want to train, and leave this out."
        )
    return min([plan.steps, *wanted])


def _listed(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]


def _problems(trainer: PrivateTrainer, model: Any, data: Any, logged: Logged) -> list[str]:
    """Returns the problems of callbacks and schedules that wait for what never comes, or that end before the run."""
    model.trainer = trainer
    try:
        schedules = _schedules(model.configure_optimizers())
    except Exception:  # the Strategy's own checks say what is wrong
        schedules = []
    held_out_rows = bool(getattr(data, "val_dataloader", list)())
    waiting: list[tuple[Any, Any]] = [(c, getattr(c, "monitor", None)) for c in trainer.callbacks]  # type: ignore[attr-defined]
    waiting += [(one.get("scheduler"), one.get("monitor")) for one in schedules]
    return [
        *(problem for part, monitor in waiting for problem in _unlogged(part, monitor, logged, held_out_rows)),
        *(problem for one in schedules for problem in _too_short(one, trainer)),
    ]


def _unlogged(part: Any, monitor: Any, logged: Logged, held_out_rows: bool) -> Iterator[str]:
    """Yields the reason why nothing will log the value that a callback or a schedule monitors."""
    if not isinstance(monitor, str) or monitor in _LOGGED_ANYWAY:
        return
    in_training, held_out = logged
    name = f"{type(part).__name__}(monitor={monitor!r})"
    plain = monitor.removesuffix("_epoch").removesuffix("_step")
    if plain in in_training and plain not in (held_out or ()):
        yield (
            f"{name} waits for a value of training rows, which a private run does not log. "
            f"HINT: monitor what validation_step logs{': ' + ', '.join(held_out) if held_out else ''}."
        )
    elif not held_out_rows:
        yield (
            f"{name} waits for a metric of held-out rows, and none are declared. HINT: give a validation loader "
            "of rows that are not among the training rows, or leave it out."
        )
    elif held_out and plain not in held_out and monitor not in held_out:
        yield f"{name} waits for a value that nothing logs. HINT: monitor {', '.join(held_out)}."


def _too_short(one: Mapping[str, Any], trainer: PrivateTrainer) -> Iterator[str]:
    """Yields the reason why a schedule of a fixed length ends before the run does."""
    total, interval = getattr(one.get("scheduler"), "total_steps", None), one.get("interval", "epoch")
    moves = trainer.max_steps if interval == "step" else trainer.max_epochs
    if isinstance(total, int) and isinstance(moves, int) and total < moves:
        yield (
            f"{type(one['scheduler']).__name__} ends after {total} {interval}s, and the run takes {moves}: sampled "
            "batches have other sizes than those of a loader. "
            "HINT: set total_steps=self.trainer.estimated_stepping_batches, with interval 'step'."
        )


def _schedules(made: Any) -> list[Mapping[str, Any]]:
    """Returns the schedules of configure_optimizers with their options, in any of the forms that Lightning accepts."""
    if isinstance(made, dict):
        found = [made.get("lr_scheduler")]
        found = [
            {"monitor": made.get("monitor")} | (one if isinstance(one, dict) else {"scheduler": one}) for one in found
        ]
    elif isinstance(made, tuple | list) and len(made) == 2 and isinstance(made[1], list | tuple):
        found = list(made[1])
    else:
        found = []
    return [one if isinstance(one, dict) else {"scheduler": one} for one in found if one is not None]
