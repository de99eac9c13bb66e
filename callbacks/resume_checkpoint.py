"""Writes the checkpoint from which a run continues, atomically, at the start, at intervals and at the end."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lipdp_lightning.callbacks.accountant import _strategy
from lipdp_lightning.files import remove_left_overs

LAST = "last.ckpt"


class ResumeCheckpoint(Callback):
    """Keeps ``directory/last.ckpt`` current, readable by its owner alone: it holds the run's secret.

    It is written before the first step, so that the secret survives a crash at any moment, and replaced
    atomically. Ctrl-C ends the run at the next step boundary, with a checkpoint; a second Ctrl-C ends it at once,
    and the run continues from the last checkpoint. ``lipdp export`` makes checkpoints for release.

    Args:
        directory: the folder of last.ckpt; `lipdp fit` uses the run directory.
        every_n_seconds: the time between two checkpoints, and so the most work that a crash may cost.
        every_n_steps: a further checkpoint is written after each so many steps.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        every_n_seconds: float = 60.0,
        every_n_steps: int | None = None,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps} is not positive. HINT: use 100, or null.")
        self.directory = None if directory is None else Path(directory)
        self.every_n_seconds, self.every_n_steps = every_n_seconds, every_n_steps
        self.interrupted = False
        self._saved_at, self._saved_step = 0.0, -1
        self._previous_handler: Any = None
        self._due = False

    @property
    def path(self) -> Path:
        """The path of the checkpoint."""
        if self.directory is None:
            raise ValueError("ResumeCheckpoint has no directory. HINT: use ResumeCheckpoint('runs/mine/checkpoints').")
        return self.directory / LAST

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.interrupted = False
        if trainer.is_global_zero:
            remove_left_overs(self.path.parent)  # they may be parts of checkpoints, which hold the secret
        self.save(trainer)
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # the handler only sets a flag, since weights in the middle of an update cannot be saved
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        sys.stderr.write("\ninterrupted: finishing this step and saving; once more to stop at once\n")

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not _strategy(trainer).between_steps or trainer.global_step == self._saved_step:
            return
        if trainer.strategy.reduce_boolean_decision(self.interrupted, all=False):
            self.interrupted = True
            trainer.should_stop = True
            return
        by_steps = self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0
        by_time = time.monotonic() - self._saved_at > self.every_n_seconds
        # ranks agree on rank 0's clock
        if trainer.strategy.broadcast(by_steps or by_time):
            # schedulers that follow a metric move after the last batch of an epoch
            self._due = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            if not self._due:
                self.save(trainer)

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if self._due:
            self.save(trainer)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.is_global_zero:
            # first, so that the checkpoint holds no steps that were reserved and not taken
            _strategy(trainer).branches.finish(trainer.global_step)
        self.save(trainer)

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        # Lightning raises this between two batches; any other exception may have torn a step
        if isinstance(exception, SIGTERMException) and self._saved_step >= 0 and _strategy(trainer).between_steps:
            self.on_train_end(trainer, pl_module)

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        if self._previous_handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._previous_handler)
            self._previous_handler = None

    def save(self, trainer: lightning.Trainer) -> None:
        """Writes last.ckpt."""
        self._due = False
        trainer.save_checkpoint(self.path, weights_only=False)
        self._saved_at, self._saved_step = time.monotonic(), trainer.global_step
