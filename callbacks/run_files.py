"""Takes the run directory when everything has been checked, and prints the plan and the certificate."""

from __future__ import annotations

from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

from callbacks.accountant import _strategy
from lipdp_lightning.privacy.spending import Spending
from lipdp_lightning.report.tables import certificate_table, plan_table
from lipdp_lightning.training.facts import group_rows
from lipdp_lightning.training.run_directory import RunDirectory


class RunFiles(Callback):
    """Creates the run directory after set-up has passed, and marks it finished when the plan's steps are taken."""

    def __init__(self, directory: RunDirectory, config: str = "", target_epsilon: float | None = None) -> None:
        self.directory, self.config, self.target_epsilon = directory, config, target_epsilon

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        strategy = _strategy(trainer)
        plan, mechanism = strategy.plan, strategy.mechanism
        assert plan is not None and mechanism is not None
        if not trainer.is_global_zero:
            return
        self.directory.create(plan.digest().hex(), plan.to_dict(), self.config)
        facts: dict[str, Any] = dict(plan.to_dict(), sample_rate=plan.sample_rate, certified=plan.certified)
        if plan.certified:
            facts["epsilon"] = Spending(plan).guarantee().epsilon
        rank_zero_info(plan_table({k: v for k, v in facts.items() if v not in (None, (), [], False) or k == "certified"}))
        rank_zero_info(certificate_table(group_rows(mechanism)))
        for logger in trainer.loggers:
            logger.log_hyperparams({"privacy_plan": facts, "config": self.config})

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        strategy = _strategy(trainer)
        assert strategy.plan is not None
        if trainer.is_global_zero:
            done = trainer.global_step >= min(strategy.branches.limit(), trainer.max_steps)
            status = "finished" if done else "stopped"
            self.directory.mark(status, strategy.plan.digest().hex(), steps=trainer.global_step)
