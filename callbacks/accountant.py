"""Shows and logs epsilon, and ends training before the plan's budget would be exceeded."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback

from lipdp_lightning.training.strategy import PrivateStrategy


class PrivacyAccountant(Callback):
    """Shows epsilon in the progress bar, in the log and in checkpoints.

    The number at a step is an upper bound on the epsilon of the steps taken so far. The guarantee of the run
    is the epsilon of its planned steps, because stopping early may depend on released values. Training stops
    at the step at which the plan's steps are spent, other branches of the run included.

    Args:
        log_every_n_steps: the number of steps between two logged values; None takes the trainer's.
    """

    def __init__(self, log_every_n_steps: int | None = None) -> None:
        self._every = log_every_n_steps
        self.epsilon = 0.0
        self._in_bar: float | None = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._in_bar = None
        self._show(trainer, pl_module, logs_now=False)
        self._stop_if_spent(trainer)

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._in_bar = None  # the bar of a new epoch is empty

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not _strategy(trainer).between_steps:
            return
        self._show(trainer, pl_module, logs_now=True)
        self._stop_if_spent(trainer)

    def _show(self, trainer: lightning.Trainer, module: lightning.LightningModule, logs_now: bool) -> None:
        strategy = _strategy(trainer)
        assert strategy.plan is not None  # checked in set-up
        if not strategy.plan.certified:
            return
        steps = strategy.branches.spent(trainer.global_step)
        # at the end, the guarantee itself is shown, and not another accountant's bound on the same steps
        planned = strategy.plan.steps
        spending = strategy.spending
        self.epsilon = spending.guarantee().epsilon if steps == planned else spending.shown(steps)
        if logs_now and self.epsilon != self._in_bar:  # a logged value is shown until the next one
            self._in_bar = self.epsilon
            # in float64, since rounding to float32 could give less than the bound
            module.log("epsilon", torch.tensor(self.epsilon, dtype=torch.float64), prog_bar=True, logger=False)
        every = self._every or trainer.log_every_n_steps  # type: ignore[attr-defined]  # 0 where nothing is to be logged
        if (every and trainer.global_step % every == 0) or steps == planned:
            for logger in trainer.loggers:
                logger.log_metrics({"privacy/epsilon": self.epsilon}, step=trainer.global_step)

    def _stop_if_spent(self, trainer: lightning.Trainer) -> None:
        if trainer.global_step >= _strategy(trainer).branches.limit():
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        return {"epsilon": self.epsilon}


def _strategy(trainer: lightning.Trainer) -> PrivateStrategy:
    strategy = trainer.strategy
    if not isinstance(strategy, PrivateStrategy):
        raise ValueError(
            f"the privacy callbacks need PrivateStrategy, and the trainer has {type(strategy).__name__}. "
            "HINT: use Trainer(strategy=PrivateStrategy(plan)), or `lipdp fit`."
        )
    return strategy
