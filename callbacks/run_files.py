"""Takes the directory of a run after all checks, and prints the plan and the certificate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import lightning
import yaml
from lightning.pytorch.callbacks import Callback

from lipdp_lightning.callbacks.accountant import _strategy
from lipdp_lightning.callbacks.temperature_scaling import planned_beside_training
from lipdp_lightning.forecast import Forecast, NoForecast, forecast
from lipdp_lightning.forecast.forecasts import signal_columns
from lipdp_lightning.report.show import show
from lipdp_lightning.report.tables import certificate_table, norm_caution, plan_table
from lipdp_lightning.training.module import PrivateModule
from lipdp_lightning.training.progress_note import ProgressNote
from lipdp_lightning.training.public_numbers import group_rows
from lipdp_lightning.training.run_directory import RunDirectory

NO_METRIC = "none: no row is held out (data.init_args.validation_fraction, or a validation loader)"
"""The words in the table before the first step if nothing will tell how good the model is."""


class RunFiles(Callback):
    """Claims the run directory, prints numbers derived from the plan, and keeps run.json and progress.json up to date.

    The run is finished when the plan's steps are spent. If it stops earlier, it can be continued.

    Args:
        directory: the run directory.
        config: the resolved configuration.
        held_out: the names of metrics of held-out rows, beside those that begin with validation/.
    """

    def __init__(self, directory: RunDirectory, config: str = "", held_out: Sequence[str] = ()) -> None:
        self.directory, self.config, self.held_out = directory, config, tuple(held_out)
        self._note: ProgressNote | None = None
        self._began: float | None = None
        self.forecast: Forecast | None = None
        self.verdict = ""

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Makes the forecast of a new run from made-up rows, while nothing is attached to the network yet."""
        plan, data = _strategy(trainer).plan, getattr(trainer, "datamodule", None)
        if stage != "fit" or not trainer.is_global_zero or trainer.ckpt_path is not None or plan is None:
            return
        assert isinstance(pl_module, PrivateModule)
        try:
            self.forecast = forecast(pl_module, plan, data)
            self.verdict = self.forecast.verdict()
        except NoForecast as error:  # a run does not depend on its forecast
            self.verdict = str(error)

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        strategy = _strategy(trainer)
        plan, mechanism = strategy.plan, strategy.mechanism
        assert plan is not None and mechanism is not None
        if not trainer.is_global_zero:
            return
        self.directory.claim(plan.digest().hex(), plan.to_dict(), self.config)
        facts: dict[str, Any] = dict(plan.to_dict(), sample_rate=plan.sample_rate, certified=plan.certified)
        facts["scaling_reason"] = strategy.scaling_reason
        if plan.certified:
            facts["epsilon"] = strategy.spending.guarantee().epsilon + planned_beside_training(trainer)
        shown = {k: v for k, v in facts.items() if v not in (None, (), [], False, "") or k == "certified"}
        reason = shown.pop("scaling_reason", "")  # by itself, since a long value makes the table wide
        why = f"why this scaling: {reason}\n\n" if reason else ""
        if strategy.where_rows_are:
            shown["training rows"] = strategy.where_rows_are
        if not getattr(trainer.datamodule, "holds_rows_out", True):  # type: ignore[attr-defined]
            shown["metrics"] = NO_METRIC
        rows = [row | signal_columns(self.forecast, row["name"]) for row in group_rows(mechanism)]
        verdict = f"forecast: {self.verdict}\n\n" if self.verdict else ""
        caution = f"{caution}\n\n" if (caution := norm_caution(rows)) else ""
        show(f"{plan_table(shown)}\n\n{why}{certificate_table(rows)}\n\n{caution}{verdict}")
        hyperparameters = {"privacy_plan": facts, **(yaml.safe_load(self.config) or {})}
        for logger in trainer.loggers:
            logger.log_hyperparams(hyperparameters)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._began = time.monotonic()
        self._note = (
            ProgressNote(self.directory, _strategy(trainer), trainer.global_step) if trainer.is_global_zero else None
        )

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Notes the progress."""
        if self._note is not None:
            self._note.before_step(
                trainer.global_step, lambda: self._metrics(trainer), lambda: planned_beside_training(trainer)
            )

    def _metrics(self, trainer: lightning.Trainer) -> dict[str, float]:
        """Returns the metrics of held-out rows under the names that they have in a report."""
        found = {k: float(v) for k, v in trainer.callback_metrics.items()}
        own = {f"validation/{name}": found[name] for name in self.held_out if name in found}
        return {k: v for k, v in found.items() if k.startswith("validation/")} | own

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        finished = trainer.global_step >= _strategy(trainer).branches.limit()
        self.mark(trainer, "finished" if finished else "stopped")

    def mark(self, trainer: lightning.Trainer, status: str) -> None:
        """Writes the progress and the status of the run into run.json."""
        plan = _strategy(trainer).plan
        assert plan is not None
        if trainer.is_global_zero:
            before, now = (self.directory.record() or {}).get("seconds", 0.0), time.monotonic()
            lasted = 0.0 if self._began is None else now - self._began
            self._began = now
            self.directory.mark(status, plan.digest().hex(), steps=trainer.global_step, seconds=before + lasted)
