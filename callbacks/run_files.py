"""The files of a run: its directory is taken after all checks, and the plan and the certificate are printed."""

from __future__ import annotations

from typing import Any

import lightning
import yaml
from lightning.pytorch.callbacks import Callback

from lipdp_lightning.callbacks.accountant import _strategy
from lipdp_lightning.callbacks.temperature_scaling import planned_beside_training
from lipdp_lightning.report.show import show
from lipdp_lightning.report.tables import certificate_table, plan_table
from lipdp_lightning.training.public_numbers import group_rows
from lipdp_lightning.training.run_directory import RunDirectory

NO_METRIC = "none: no row is held out (data.init_args.validation_fraction)"
"""What the table before the first step says where nothing will tell how good the model is."""


class RunFiles(Callback):
    """Claims the run directory, prints numbers derived from the plan, and keeps run.json up to date.

    The run is finished when the plan's steps are spent. If it stops earlier, it can be continued.
    """

    def __init__(self, directory: RunDirectory, config: str = "") -> None:
        self.directory, self.config = directory, config

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        strategy = _strategy(trainer)
        plan, mechanism = strategy.plan, strategy.mechanism
        assert plan is not None and mechanism is not None
        if not trainer.is_global_zero:
            return
        self.directory.claim(plan.digest().hex(), plan.to_dict(), self.config)
        facts: dict[str, Any] = dict(plan.to_dict(), sample_rate=plan.sample_rate, certified=plan.certified)
        if plan.certified:
            facts["epsilon"] = strategy.spending.guarantee().epsilon + planned_beside_training(trainer)
        shown = {k: v for k, v in facts.items() if v not in (None, (), [], False) or k == "certified"}
        if strategy.where_rows_are:
            shown["training rows"] = strategy.where_rows_are
        if not getattr(trainer.datamodule, "holds_rows_out", True):  # type: ignore[attr-defined]
            shown["metrics"] = NO_METRIC
        show(f"{plan_table(shown)}\n\n{certificate_table(group_rows(mechanism))}\n\n")
        hyperparameters = {"privacy_plan": facts, **(yaml.safe_load(self.config) or {})}
        for logger in trainer.loggers:
            logger.log_hyperparams(hyperparameters)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        finished = trainer.global_step >= _strategy(trainer).branches.limit()
        self.mark(trainer, "finished" if finished else "stopped")

    def mark(self, trainer: lightning.Trainer, status: str) -> None:
        """Writes the progress and the status of the run into run.json."""
        plan = _strategy(trainer).plan
        assert plan is not None
        if trainer.is_global_zero:
            self.directory.mark(status, plan.digest().hex(), steps=trainer.global_step)
