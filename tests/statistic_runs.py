"""Small private runs whose data module releases two means before the first step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from small_runs import SECRET, Blobs, make_module, make_plan, make_trainer
from torch import Tensor

from lipdp_lightning.data_modules.poisson import InMemoryRows
from lipdp_lightning.privacy.branches import Branches
from lipdp_lightning.privacy.statistics import Statistics, Terms
from lipdp_lightning.training import PrivateModule, PrivateStrategy
from lipdp_lightning.training.step_record import StepRecord

MEANS = (("mean of rows", 5.0), ("mean of squares", 8.0))


class MeanBlobs(Blobs):
    """Rows are used with the first released mean removed. Counts how often the rows were looked at for a release."""

    preliminary = MEANS

    def __init__(self, shift: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.shift, self.looks, self.used = shift, 0, dict[str, Tensor]()

    def load_train(self) -> tuple[Tensor, Tensor]:
        x, y = super().load_train()
        return x + self.shift, y

    def statistic_terms(self, label: str) -> Terms:
        self.looks += 1
        x = super()._ready().x
        return Terms(6, [x if label == "mean of rows" else x.square()])

    def use_statistics(self, values: Mapping[str, Tensor]) -> None:
        assert not self.used or all(torch.equal(self.used[label], value) for label, value in values.items())
        self.used = dict(values)

    def _ready(self) -> InMemoryRows:
        if not self.used:
            raise ValueError("the means have not been released.\nHINT: train first.")
        return super()._ready()

    def transform_batch(self, x: Tensor) -> Tensor:
        return x - self.used["mean of rows"].float()


def mean_plan(**options: Any) -> Any:
    return make_plan(preliminary=MEANS, **options)


def mean_strategy(directory: Path | None, plan: Any = None, **options: Any) -> PrivateStrategy:
    options = {"fixed_secret": SECRET} | options
    if directory is not None:
        options |= {
            "branches": Branches(directory / "ledger.json"), "record": StepRecord(directory / "steps.txt"),
            "statistics": Statistics(directory / "statistics.npz"),
        }  # fmt: skip
    return PrivateStrategy(mean_plan() if plan is None else plan, **options)


def mean_session(
    directory: Path | None, *callbacks: Any, data: Any = None, checkpoint: Path | None = None,
    plan: Any = None, trainer: dict[str, Any] | None = None, **options: Any,
) -> tuple[PrivateModule, lightning.Trainer, Any]:  # fmt: skip
    """Start a run, or continue it from a checkpoint; the module, the trainer and the data module afterwards."""
    data = MeanBlobs() if data is None else data
    made = make_trainer(mean_strategy(directory, plan, **options), *callbacks, **(trainer or {}))
    module = make_module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(module, datamodule=data, ckpt_path=None if checkpoint is None else str(checkpoint), weights_only=False)
    return module, made, data
