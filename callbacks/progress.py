"""The progress of a private run: a bar in a terminal, or a line per validation in a log file."""

from __future__ import annotations

import sys
from typing import Any

import lightning
from lightning.pytorch.callbacks import TQDMProgressBar

from lipdp_lightning.bound_text import ShownBound


class PrivateProgressBar(TQDMProgressBar):
    """Lightning's bar with epsilon in it.

    If the output is no terminal (a log of a batch system), a bar would write a line per step. One line is
    written after each validation instead, and at least twenty in a run.
    """

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._lines = not sys.stdout.isatty()
        self._written = -1
        if self._lines:
            self.disable()

    def get_metrics(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> dict[str, Any]:
        """Returns the values in the bar, with epsilon rounded up."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        epsilon = metrics.get("epsilon")
        if isinstance(epsilon, int | float):  # the bar itself would round to nearest, perhaps down
            metrics["epsilon"] = ShownBound(epsilon)
        return metrics

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.global_step - max(self._written, 0) >= max(1, trainer.max_steps // 20):
            self._line(trainer, pl_module)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.training or (trainer.validating and trainer.state.fn == "fit"):
            self._line(trainer, pl_module)

    def _line(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if not self._lines or not trainer.is_global_zero or trainer.sanity_checking:
            return
        if trainer.global_step == self._written:
            return
        self._written = trainer.global_step
        metrics = {k: v for k, v in self.get_metrics(trainer, module).items() if isinstance(v, int | float)}
        shown = "  ".join(f"{name}={value:.4g}" for name, value in metrics.items())
        sys.stdout.write(f"step {trainer.global_step}/{trainer.max_steps}  {shown}\n")
        sys.stdout.flush()
