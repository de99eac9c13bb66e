"""Measures the cost of K views of an example: a step with views beside steps of as many rows, and of one row.

``python -m lipdp_lightning.studies.multiplicity`` prints the table. The cases take turns on one thread, and every
number is a ratio within one run.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback

from ..augmentations import HorizontalFlip, ShiftedCrop
from ..bench.trained import RandomRows
from ..models import ConvNet
from ..privacy.plan import PrivacyPlan
from ..training import PrivateModule, PrivateStrategy
from ..training.views import Views

SHAPE = (3, 32, 32)
WARM_UP = 2


@dataclass(frozen=True)
class ViewCost:
    """The cost of a step with views: ``over_rows`` over a step of as many examples, ``over_passes`` over K steps
    without views.
    """

    views: int
    examples: int
    seconds: float
    over_rows: float
    over_passes: float


class _Cost(Callback):
    """Times steps; ``views`` is where the Strategy looks for them."""

    def __init__(self, views: int) -> None:
        self.views = Views(views, [HorizontalFlip(), ShiftedCrop()]) if views > 1 else None
        self.starts: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.starts.append(time.perf_counter())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.starts.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.starts, self.starts[1:], strict=False)][WARM_UP:]


def _steps(views: int, examples: int, steps: int) -> list[float]:
    """Returns the seconds of some steps; the samples are of fixed size, since every row is in each."""
    torch.manual_seed(0)
    data, cost = RandomRows(SHAPE, examples), _Cost(views)
    plan = PrivacyPlan.create(
        dataset_size=examples, expected_batch_size=examples, noise_multiplier=1.0, delta=1e-6, steps=steps + WARM_UP,
        accountant="rdp", scaling="joint", allocation="global",
    )  # fmt: skip
    module = PrivateModule(ConvNet(SHAPE, 10), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
    trainer = lightning.Trainer(
        strategy=PrivateStrategy(plan), callbacks=[cost], accelerator="cpu", devices=1, max_steps=plan.steps,
        max_epochs=-1, use_distributed_sampler=False, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    return cost.seconds()


def measure(views: int, examples: int, steps: int = 6, turns: int = 3) -> ViewCost:
    """Returns medians over the steps of all turns."""
    cases = {"views": (views, examples), "rows": (1, views * examples), "one": (1, examples)}
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(turns):
        for name, (number, size) in cases.items():
            found[name] += _steps(number, size, steps)
    median = {name: statistics.median(seconds) for name, seconds in found.items()}
    return ViewCost(
        views, examples, median["views"], median["views"] / median["rows"], median["views"] / (views * median["one"])
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lipdp_lightning.studies.multiplicity", description=__doc__)
    parser.add_argument("--views", type=int, nargs="+", default=[4, 16], help="numbers of views")
    parser.add_argument("--examples", type=int, default=32, help="batch size")
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn")
    parser.add_argument("--turns", type=int, default=3, help="turns of each case")
    own = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.stdout.write("views  examples  step with views / step of as many examples  / K steps of the examples\n")
    for views in own.views:
        cost = measure(views, own.examples, own.steps, own.turns)
        sys.stdout.write(f"{views:>5}{own.examples:>10}{cost.over_rows:>44.3f}{cost.over_passes:>27.3f}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
