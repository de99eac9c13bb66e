"""Collects a run's facts while it trains, and writes the report when it ends, however it ends."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import lightning
import numpy as np
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger

from lipdp_lightning.accounting.accountants import PrivacyBound
from lipdp_lightning.bound_text import upper_text
from lipdp_lightning.callbacks.accountant import _strategy
from lipdp_lightning.callbacks.augmentation_multiplicity import AugmentationMultiplicity
from lipdp_lightning.callbacks.calibration_metrics import CalibrationMetrics, calibration_results
from lipdp_lightning.callbacks.gradient_noise import GradientNoiseMonitor
from lipdp_lightning.callbacks.parameter_averaging import ParameterAveraging, averaging_of
from lipdp_lightning.callbacks.private_curves import PrivateValidationCurves
from lipdp_lightning.callbacks.temperature_scaling import (
    TemperatureScaling,
    ledger_beside_training,
    planned_beside_training,
    released_beside_training,
)
from lipdp_lightning.privacy.plan import PrivacyPlan
from lipdp_lightning.report.formats import clean_text
from lipdp_lightning.report.model import RunFacts
from lipdp_lightning.report.plots import all_figures
from lipdp_lightning.report.write import write_report
from lipdp_lightning.training.private_steps import PrivateSteps
from lipdp_lightning.training.public_numbers import group_rows

HELD_OUT = ("validation/", "test/")
_NOTED = (
    PrivateValidationCurves, AugmentationMultiplicity, ParameterAveraging, TemperatureScaling, CalibrationMetrics,
)  # fmt: skip
_PACKAGES = ("lipdp-lightning", "torch", "lightning", "opacus", "prv-accountant", "dp-accounting", "numpy")


class PrivacyReport(Callback):
    """Writes privacy_report.json, privacy_report.md and report.html into ``directory``.

    Held-out metrics are marked as such. The report states the epsilon of the planned steps as the guarantee, and
    beside it the epsilon of the steps taken.

    Args:
        directory: the folder in which the files are written.
        title: the title of the report.
        config: the resolved configuration, shown in the report.
        publish: whether to send plots, table and summary to the loggers when training ends; `lipdp fit` does so later,
            with the held-out metrics, and then draws the page of a run that took all its steps, too.
    """

    def __init__(
        self, directory: str | Path, title: str = "Private training run", config: str = "", publish: bool = True
    ) -> None:
        self.directory, self.title, self.config, self._publish = Path(directory), title, config, publish
        self.history: list[dict[str, Any]] = []
        self.paths: dict[str, Path] = {}
        self.facts: RunFacts | None = None
        self._taken: tuple[int, PrivacyBound] | None = None
        self._trains = False

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._trains = True

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.sanity_checking or not self._trains:
            return
        strategy = _strategy(trainer)
        steps = strategy.branches.spent(trainer.global_step)
        row: dict[str, Any] = {"step": trainer.global_step}
        assert strategy.plan is not None
        if strategy.plan.certified:
            row["epsilon"] = strategy.spending.shown(steps)
        row.update({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("validation/")})
        if not self.history or self.history[-1]["step"] != row["step"]:
            self.history.append(row)

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = list(state_dict["history"])

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.write(trainer, pl_module, final=self._publish)
        if self._publish:
            self.publish(trainer)

    def write(
        self, trainer: lightning.Trainer, module: Any, metrics: dict[str, float] | None = None, *, final: bool = True
    ) -> None:
        """Writes the report.

        Args:
            trainer: the trainer of the run.
            module: the trainer's LightningModule.
            metrics: the final held-out metrics; by default, the last that were logged.
            final: whether this is the last call of the run. If not, report.html, whose plots take a second or more, is
                drawn only for a run that stopped before its last planned step.
        """
        if not trainer.is_global_zero:
            return
        if metrics is None:
            metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith(HELD_OUT)}
        self.facts = self._facts(trainer, module, metrics)
        self.paths = write_report(self.directory, self.facts, page=final or self.facts.stopped_early)

    def publish(self, trainer: lightning.Trainer) -> None:
        """Sends plots as images, the layers as a table, the summary and the report to the loggers that accept them."""
        if not trainer.is_global_zero or self.facts is None:
            return
        for logger in trainer.loggers:
            if hasattr(logger, "log_image"):
                for name, figure in all_figures(self.facts).items():
                    logger.log_image(key=f"report/{name}", images=[_picture(figure)])
            if hasattr(logger, "log_table") and self.facts.groups:
                columns = list(self.facts.groups[0])
                cells = [[group.get(column) for column in columns] for group in self.facts.groups]
                rows = [[clean_text(cell) if isinstance(cell, str) else cell for cell in row] for row in cells]
                logger.log_table(key="report/layers", columns=columns, data=rows)
            summary = getattr(getattr(logger, "experiment", None), "summary", None)
            if summary is not None and hasattr(summary, "update"):
                summary.update(_rounded_up(summary_of(self.facts)))
            if isinstance(logger, WandbLogger):
                self._attach(logger.experiment)

    def _attach(self, run: Any) -> None:
        """Attaches the three files of the report to a run of W&B, which uploads them, at once or by `wandb sync`."""
        import wandb

        artifact = wandb.Artifact(f"privacy-report-{run.id}", type="privacy-report")
        for path in self.paths.values():
            artifact.add_file(str(path))
        run.log_artifact(artifact)

    def _facts(self, trainer: lightning.Trainer, module: Any, metrics: dict[str, float]) -> RunFacts:
        steps: Any = trainer.strategy
        strategy = steps if isinstance(steps, PrivateSteps) else _strategy(trainer)  # which says what is missing
        plan, mechanism, branches = strategy.plan, strategy.mechanism, strategy.branches
        assert plan is not None and mechanism is not None
        options = plan.to_dict()
        spending = strategy.spending
        taken = branches.spent(trainer.global_step)
        planned = spending.guarantee() if plan.certified else None
        over = spending.exactly(taken) if plan.certified and taken > plan.steps else planned
        # basic composition: epsilons add, and these releases have no delta
        beside, released = planned_beside_training(trainer), released_beside_training(trainer)
        notes = [
            f"{label}: estimated from all training rows before the first step, once, with noise multiplier {level:g}; "
            "epsilon covers it together with the steps"
            for label, level in plan.preliminary
        ]
        if planned is not None and planned.accountant != plan.accountant:
            notes.append(f"epsilon: {planned.note}")
        if branches.count > 1:
            notes.append(f"{branches.count} branches of this run count together: {taken} steps")
        if branches.copied:
            notes.append(
                "this run was continued from a copy of its directory, or from a backup, with a new secret: steps that "
                "were taken in another copy are further releases on the same data, and the epsilon here leaves them out"
            )
        if strategy.scaling_reason:
            notes.append(f"the scaling {plan.scaling!r} was chosen from the certificate: {strategy.scaling_reason}")
        if strategy.fixed_secret is not None:
            notes.append("the secret was fixed for a test: whoever knows it can remove the noise")
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, _NOTED):
                notes += callback.report_notes()
        return RunFacts(
            title=self.title,
            certified=plan.certified,
            epsilon=None if over is None else over.epsilon + beside,
            epsilon_lower=None if over is None else over.lower,
            epsilon_upper=None if over is None else over.upper + beside,
            epsilon_taken=self._exactly(strategy, taken).epsilon + released if plan.certified else None,
            delta=plan.delta,
            adjacency=plan.adjacency,
            noise_multiplier=plan.noise_multiplier,
            sample_rate=plan.sample_rate,
            dataset_size=plan.dataset_size,
            expected_batch_size=plan.expected_batch_size,
            steps_planned=plan.steps,
            steps_taken=taken,
            accountant=plan.accountant if over is None else over.accountant,
            scaling=plan.scaling,
            allocation=options["allocation"],
            projection=None if options["max_norm"] is None else options["projection"],
            clipping=options["clipping"],
            clip_norm=options["clip_norm"],
            switch=_switch(plan),
            loss_clip=plan.loss_clip,
            unit=plan.unit,
            secret_fixed=branches.secret_fixed,
            not_certified_because=_uncertified(plan),
            groups=group_rows(mechanism),
            averaged_groups=[] if (averaging := averaging_of(trainer)) is None else averaging.certificate(),
            metrics=metrics,
            metric_sources=dict.fromkeys(metrics, "validation"),
            primary_metric=next((k for k in metrics if k.endswith(("/accuracy", "/mae"))), None),
            nonprivate_released=_released(module, plan),
            versions=_versions(),
            history=self._merged_history(trainer),
            ledger=[*_ledger(plan, taken), *ledger_beside_training(trainer)],
            calibration=calibration_results(trainer),
            data=_declared(trainer),
            notes=notes,
            config=self.config,
        )

    def _exactly(self, strategy: PrivateSteps, steps: int) -> PrivacyBound:
        """Returns the epsilon of the steps taken; the last answer is kept, since reports are written repeatedly."""
        if self._taken is None or self._taken[0] != steps:
            self._taken = (steps, strategy.spending.exactly(steps))
        return self._taken[1]

    def _merged_history(self, trainer: lightning.Trainer) -> list[dict[str, Any]]:
        """Returns the validation rows, and the monitor's gradient-to-noise ratios between them."""
        rows = {row["step"]: dict(row) for row in self.history}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GradientNoiseMonitor):
                for row in callback.history:
                    entry = rows.setdefault(row["step"], {"step": row["step"]})
                    entry["gradient_to_noise"] = row["gradient_to_noise"]
        return [rows[step] for step in sorted(rows)]


def _declared(trainer: lightning.Trainer) -> list[str]:
    """Returns what the data module declares, a line for each fact; nothing of it was read from private rows."""
    data: Any = getattr(trainer, "datamodule", None)
    return data.describe().splitlines() if hasattr(data, "describe") else []


def summary_of(facts: RunFacts) -> dict[str, Any]:
    """Returns the numbers that summarise a run, with an epsilon only if there is a guarantee."""
    summary: dict[str, Any] = {
        "certified": facts.certified, "delta": facts.delta, "noise_multiplier": facts.noise_multiplier,
        "steps": facts.steps_taken, "adjacency": facts.adjacency, **facts.metrics,
    }  # fmt: skip
    if facts.certified:
        summary |= {"epsilon": facts.epsilon, "epsilon_taken": facts.epsilon_taken}
    for name in reversed(list(facts.metrics)):
        if name.endswith(("/accuracy", "/mae")):
            summary[name.rpartition("/")[2]] = facts.metrics[name]
    return summary


def _rounded_up(summary: dict[str, Any]) -> dict[str, Any]:
    """Returns the summary with its costs rounded up to seven digits."""
    costs = {name: summary.get(name) for name in ("epsilon", "epsilon_taken")}
    return summary | {name: float(upper_text(value, 7)) for name, value in costs.items() if value is not None}


def _uncertified(plan: PrivacyPlan) -> str | None:
    if plan.certified:
        return None
    if plan.scaling == "batch_max":
        return "the scaling depends on the whole private batch"
    return "No noise was added." if plan.scaling != "none" else "Nothing was clipped and no noise was added."


def _switch(plan: PrivacyPlan) -> str | None:
    to = plan.to_dict()["switch_to"]
    return None if to is None else f"{to} from step {plan.first_switched_step} on"


def _released(module: Any, plan: PrivacyPlan) -> list[str]:
    released = []
    if getattr(module, "log_nonprivate", False):
        released.append("nonprivate/loss: the training loss of every step, logged on request")
    if plan.noise_multiplier == 0:
        released += [
            "the weights after every step: checkpoints and exports hold functions of the private rows without noise",
            "the gradient of every step: callbacks, loggers and the optimizer's state see it without noise",
        ]
    return released


def _ledger(plan: Any, taken: int) -> list[dict[str, Any]]:
    """Returns the releases: the statistics before the first step, and so many steps."""
    return [dataclasses.asdict(entry) for entry in plan.events(taken)]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _picture(figure: Any) -> Any:
    """Returns a figure as an array of pixels, which loggers accept without a display."""
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3]
