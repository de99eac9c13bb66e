"""The checkpoint a run continues from: written at the start, at intervals and at the end, never torn."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from callbacks.accountant import _strategy

LAST = "last.ckpt"


class ResumeCheckpoint(Callback):
    """Keeps ``directory/last.ckpt`` current, readable by its owner alone: it holds the run's secret.

    It is written before the first step, so that a crash at any moment finds the secret, and replaced
    atomically. Checkpoints for release are made by ``lipdp export``.
    """

    def __init__(self, directory: str | Path, every_n_seconds: float = 60.0, every_n_steps: int | None = None) -> None:
        self.path = Path(directory) / LAST
        self.every_n_seconds, self.every_n_steps = every_n_seconds, every_n_steps
        self._saved_at, self._saved_step = 0.0, -1

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.save(trainer)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches or trainer.global_step == self._saved_step:
            return
        by_steps = self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0
        by_time = time.monotonic() - self._saved_at > self.every_n_seconds
        # ranks agree on rank 0's clock
        if trainer.strategy.broadcast(by_steps or by_time):
            self.save(trainer)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.save(trainer)
        if trainer.is_global_zero:
            _strategy(trainer).branches.finish(trainer.global_step)

    def save(self, trainer: lightning.Trainer) -> None:
        temporary = self.path.with_suffix(".part")
        if trainer.is_global_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
        trainer.save_checkpoint(temporary)
        if trainer.is_global_zero:
            os.chmod(temporary, 0o600)
            os.replace(temporary, self.path)
        self._saved_at, self._saved_step = time.monotonic(), trainer.global_step
