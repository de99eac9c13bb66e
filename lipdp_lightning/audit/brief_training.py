"""Runs the first steps of a training with the real Trainer, and writes no files."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from ..training.module import PrivateModule
from ..training.strategy import PrivateStrategy


def train_briefly(
    module: PrivateModule, data: Any, strategy: PrivateStrategy, steps: int, *, callbacks: Sequence[Callback] = (),
    logger: Logger | bool = False,
) -> None:  # fmt: skip
    """Trains the module under the strategy's plan for ``steps`` steps, in one process on the CPU."""
    options: dict[str, Any] = {"logger": logger, "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {"enable_model_summary": False, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1, use_distributed_sampler=False,
            strategy=strategy, callbacks=list(callbacks), **options,
        )  # fmt: skip
        trainer.fit(module, datamodule=data)
