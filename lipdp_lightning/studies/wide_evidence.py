"""Trains a thin WideResNet on small CIFAR-10 images by exact norms, by opacus and without privacy; keeps the curves.

    python -m lipdp_lightning.studies.wide_evidence --output curves.jsonl [--minutes 20] [--steps 400]

The images are the inner 16 x 16 pixels, the network is WideResNet-10-1 with weight standardisation, the budget is
(8, 1e-5), and every method gets the same steps, batch and step size. The accuracy on 2000 test images is noted after
every twentieth part of the run, with the seconds that training took so far. A method that is out of minutes stops at
its next note; its epsilon is that of the whole plan. A method that the file holds is not trained again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor

from ..data_modules import CIFAR10
from ..data_modules.base import Rows, box_norm
from ..experiment.experiment import Experiment
from ..experiment.short_training import prepare

SIDE = 16
NOTES, TEST_ROWS = 20, 2000
_EXACT = {
    "scaling": "exact", "radius": 1.0, "allocation": "global", "max_norm": 64.0, "standardize": "mean_and_variance",
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "exact": _EXACT,
    "exact, 4 views": _EXACT,
    "opacus, flat clipping": {"method": "dpsgd_flat", "clip_norm": 1.0},
    "no privacy": {"method": "nonprivate"},
}
LEARNING_RATES = {"no privacy": 0.1}


class InnerCIFAR10(CIFAR10):
    """The inner 16 x 16 pixels of every image, which is a public crop."""

    input_shape = (3, SIDE, SIDE)
    input_bound = box_norm((3, SIDE, SIDE), -1.0, 1.0)

    def _read(self, part: str) -> Rows:
        x, y = super()._read(part)
        edge = (x.shape[-1] - SIDE) // 2
        return x[..., edge : edge + SIDE, edge : edge + SIDE].contiguous(), y


def config(method: str, steps: int) -> dict[str, Any]:
    """Returns the configuration of one method."""
    network = {
        "class_path": "lipdp_lightning.models.WideResNet",
        "init_args": {"input_shape": [3, SIDE, SIDE], "outputs": 10, "depth": 10, "width": 1},
    }
    privacy = {"epsilon": 8.0, "delta": 1e-5, "steps": steps, "batch_size": 2048, "physical_batch_size": 512}
    return {
        "seed_everything": 1,
        "model": {"network": network, "input_bound": 20.0},
        "data": {"class_path": f"{__name__ if __name__ != '__main__' else __spec__.name}.InnerCIFAR10"},
        "privacy": privacy | METHODS[method],
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": LEARNING_RATES.get(method, 2.0)}},
        "trainer": {"accelerator": "cpu", "devices": 1, "callbacks": _callbacks(method)},
    }


def _callbacks(method: str) -> list[dict[str, Any]]:
    average = {
        "class_path": "lipdp_lightning.callbacks.ParameterAveraging",
        "init_args": {"kind": "ema", "decay": 0.99},
    }
    if not method.endswith("views"):
        return [average]
    augmentations = [
        {"class_path": "lipdp_lightning.augmentations.HorizontalFlip"},
        {"class_path": "lipdp_lightning.augmentations.ShiftedCrop", "init_args": {"padding": 2, "mode": "reflect"}},
    ]
    views = {
        "class_path": "lipdp_lightning.callbacks.AugmentationMultiplicity",
        "init_args": {"views": 4, "augmentations": augmentations},
    }
    return [average, views]


class Curve(lightning.Callback):
    """Notes the accuracy on test images along a run, and ends it when its time is over."""

    def __init__(self, x: Tensor, y: Tensor, every: int, seconds: float) -> None:
        self.x, self.y, self.every, self.seconds = x, y, every, seconds
        self.points: list[dict[str, float]] = []
        self._trained, self._since = 0.0, 0.0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._since = time.perf_counter()

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: Any, *_: Any) -> None:
        step = trainer.global_step
        if step % self.every or (self.points and self.points[-1]["step"] == step):
            return
        self._trained += time.perf_counter() - self._since
        with torch.no_grad():
            found = torch.cat([pl_module(part).argmax(1) for part in self.x.split(500)])
        accuracy = float((found == self.y).double().mean())
        self.points.append({"step": step, "seconds": round(self._trained, 1), "accuracy": accuracy})
        if self._trained > self.seconds:
            trainer.should_stop = True
        self._since = time.perf_counter()


def curve(method: str, steps: int, minutes: float) -> dict[str, Any]:
    """Returns the learning curve of one method, of its last weights and, at the end, of their average."""
    experiment: Experiment = prepare(config(method, steps)).experiment
    data = experiment.datamodule
    data.setup()
    x, y = data.transform_batch(data.load_test()[0][:TEST_ROWS]), data.load_test()[1][:TEST_ROWS].long()
    noted = Curve(x, y, max(1, steps // NOTES), 60 * minutes)
    experiment.trainer.callbacks.append(noted)  # type: ignore[attr-defined]
    experiment.trainer.limit_val_batches = 0
    experiment.trainer.fit(experiment.model, datamodule=data)
    seconds = noted.points[-1]["seconds"] / noted.points[-1]["step"] if noted.points else 0.0
    return {"method": method, "steps": steps, "seconds_per_step": round(seconds, 3), "points": noted.points}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the last points as Markdown."""
    lines = ["| method | steps | seconds a step | test accuracy |", "|---|---:|---:|---:|"]
    for row in rows:
        last = row["points"][-1] if row["points"] else {"step": 0, "accuracy": 0.0}
        cells = [row["method"], f"{last['step']}", f"{row['seconds_per_step']:.2f}", f"{100 * last['accuracy']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file with one line per method, which is continued")
    parser.add_argument("--steps", type=int, default=400, help="steps of every method (default 400)")
    parser.add_argument("--minutes", type=float, default=20.0, help="minutes of training per method (default 20)")
    parser.add_argument("--method", choices=tuple(METHODS), help="train one method only")
    own = parser.parse_args()
    known = [json.loads(line) for line in own.output.read_text().splitlines()] if own.output.exists() else []
    for method in [own.method] if own.method else METHODS:
        if method not in [row["method"] for row in known]:
            known.append(curve(method, own.steps, own.minutes))
            with own.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known[-1]) + "\n")
    sys.stdout.write(f"{table(known)}\n")


if __name__ == "__main__":
    main()
