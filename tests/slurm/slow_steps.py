"""A callback for jobs that a test interrupts: known noise, steps that take time, and a mark after each."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from lipdp_lightning.slurm.environment import job_id

SECRET = bytes(range(16))


class SlowSteps(Callback):
    """From the environment, because the configuration has to stay that of an uninterrupted run.

    STEP_SECONDS: what each step takes; RANK_SECONDS: what it takes rank 1 in addition; MARKS: a folder.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        trainer.strategy.fixed_secret = SECRET

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        if trainer.global_rank == 1:
            time.sleep(float(os.environ.get("RANK_SECONDS", "0")))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if "MARKS" in os.environ and trainer.is_global_zero:
            (Path(os.environ["MARKS"]) / str(job_id())).write_text(str(trainer.global_step))
