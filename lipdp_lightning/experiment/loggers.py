"""Logs a run's metrics to a CSV file, which a continued run appends to, and to Weights & Biases."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.csv_logs import _ExperimentWriter
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only

from ..extras import require
from ..files import naming
from ..report.formats import clean_text

MOST_LETTERS = 64  # of a tag of W&B


class _KeepingWriter(ExperimentWriter):
    """Keeps the rows that an interrupted run has written, unlike Lightning's writer."""

    def _check_log_dir_exists(self) -> None:
        if os.path.isfile(self.metrics_file_path):
            with open(self.metrics_file_path, newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])


class RunCSVLogger(CSVLogger):
    """Writes ``<run directory>/csv/metrics.csv``; a continued run appends to it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, name="", version="csv")

    @property
    def experiment(self) -> Any:
        if getattr(rank_zero_only, "rank", 0) != 0:
            return super().experiment
        if self._experiment is None:
            self._experiment = _KeepingWriter(log_dir=self.log_dir)
        return self._experiment

    @rank_zero_only
    def save(self) -> None:
        with naming(Path(self.log_dir) / "metrics.csv", "The run's checkpoint is whole."):
            super().save()


assert issubclass(_KeepingWriter, _ExperimentWriter)


def wandb_logger(directory: Path, run_id: str, mode: str, tags: Sequence[str] = ()) -> Any:
    """Returns a logger that is offline unless a key is set or online is asked for; a continued run keeps its id.

    The runs of a folder, such as those of an array, are a group, and each has the folder's name in its own; wandb's
    variables WANDB_RUN_GROUP, WANDB_JOB_TYPE and WANDB_TAGS come first. Checkpoints are not uploaded, because they hold
    the run's secret.
    """
    require("wandb", f"--wandb {mode}")
    from lightning.pytorch.loggers import WandbLogger

    os.environ.setdefault("WANDB_SILENT", "true")
    has_key = bool(os.environ.get("WANDB_API_KEY"))
    offline = mode == "offline" or (mode == "auto" and not has_key)
    place = Path(os.path.abspath(directory))
    folder = place.parent.name
    chosen = os.environ.get("WANDB_TAGS")
    logger = WandbLogger(
        project=os.environ.get("WANDB_PROJECT", "lipdp"), save_dir=str(directory), offline=offline, id=run_id,
        name=place.name if folder in ("", "runs") else f"{folder}/{place.name}", resume="allow", log_model=False,
        group=os.environ.get("WANDB_RUN_GROUP", folder) or None, job_type=os.environ.get("WANDB_JOB_TYPE", "fit"),
        tags=[clean_text(tag)[:MOST_LETTERS] for tag in (tags if chosen is None else chosen.split(","))],
    )  # fmt: skip
    logger._wandb_init.pop("anonymous", None)  # wandb warns about it, even when it is None
    return logger
