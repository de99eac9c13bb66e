"""Trains a thin WideResNet on small CIFAR-10 images by exact norms, by opacus and without privacy, in turns.

    python -m lipdp_lightning.studies.wide_evidence --time
    python -m lipdp_lightning.studies.wide_evidence --output curves.csv --figure curves.png

The images are those of CIFAR-10, averaged over squares of 2 x 2 pixels to 16 x 16; the network is WideResNet-10-1; the
budget is (8, 1e-5). All methods get the same steps, batch, views, weight standardisation and average of the weights,
and both private methods clip the mean over an example's views to norm 1. Every method is a process of its own, and they
take turns of a few steps, so that a busy machine slows all of them down alike. The accuracy on test images is written
at every note, for the last weights and for their average, with the processor time that training took so far.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data_modules import CIFAR10
from ..data_modules.base import Rows, box_norm
from ..experiment.experiment import Experiment
from ..experiment.short_training import prepare
from ..norm_balls import standardize

SIDE, VIEWS, TURN = 16, 2, 5
NOTES, FEW_ROWS = 16, 2000
METHODS: dict[str, dict[str, Any]] = {
    "exact norms": {
        "scaling": "exact", "radius": 1.0, "allocation": "global", "max_norm": 64.0, "standardize": "mean_and_variance",
        "cotangent_clip": {"features.*.body.5": 1000.0},
    },
    "opacus, flat clipping": {"method": "dpsgd_flat", "clip_norm": 1.0},
    "no privacy": {"method": "nonprivate"},
    "opacus, ghost clipping": {"method": "dpsgd_ghost", "clip_norm": 1.0},  # clips every view: for its time alone
}  # fmt: skip
TRAINED = ("exact norms", "opacus, flat clipping", "no privacy")
LEARNING_RATES = {"no privacy": 0.5}
FIELDS = ("method", "step", "steps", "cpu_seconds", "rows", "accuracy", "average_accuracy")


class PooledCIFAR10(CIFAR10):
    """The images of CIFAR-10, averaged over squares of 2 x 2 pixels and rounded to bytes: a public map."""

    input_shape = (3, SIDE, SIDE)
    input_bound = box_norm((3, SIDE, SIDE), -1.0, 1.0)

    def _read(self, part: str) -> Rows:
        x, y = super()._read(part)
        pooled = [F.avg_pool2d(rows.float(), x.shape[-1] // SIDE).round().to(x.dtype) for rows in x.split(4096)]
        return torch.cat(pooled), y


def config(
    method: str, steps: int, batch: int, learning_rate: float = 2.0, held_out: float = 0.0, seed: int = 1
) -> dict[str, Any]:
    """Returns the configuration of one method."""
    network = {
        "class_path": "lipdp_lightning.models.WideResNet",
        "init_args": {"input_shape": [3, SIDE, SIDE], "outputs": 10, "depth": 10, "width": 1, "norm_alpha": 0.1},
    }
    privacy = {"epsilon": 8.0, "delta": 1e-5, "steps": steps, "batch_size": batch, "physical_batch_size": 256}
    return {
        "seed_everything": seed,
        "model": {"network": network, "input_bound": 20.0},
        "data": {
            "class_path": "lipdp_lightning.studies.wide_evidence.PooledCIFAR10",
            "init_args": {"validation_fraction": held_out},
        },
        "privacy": privacy | METHODS[method],
        "optimizer": {
            "class_path": "torch.optim.SGD", "init_args": {"lr": LEARNING_RATES.get(method, learning_rate)},
        },
        "trainer": {"accelerator": "cpu", "devices": 1, "callbacks": _callbacks()},
    }  # fmt: skip


def _callbacks() -> list[dict[str, Any]]:
    augmentations = [
        {"class_path": "lipdp_lightning.augmentations.HorizontalFlip"},
        {"class_path": "lipdp_lightning.augmentations.ShiftedCrop", "init_args": {"padding": 2, "mode": "reflect"}},
    ]
    views = {
        "class_path": "lipdp_lightning.callbacks.AugmentationMultiplicity",
        "init_args": {"views": VIEWS, "augmentations": augmentations},
    }
    average = {
        "class_path": "lipdp_lightning.callbacks.ParameterAveraging",
        "init_args": {"kind": "ema", "decay": 0.98},
    }
    return [average, views]


class Standardized(lightning.Callback):
    """Standardises the kernels after every step, as the projection does under exact norms."""

    def __init__(self) -> None:
        self._before = 0

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step != self._before:
            self._before = trainer.global_step
            standardize_all(pl_module.network)


@torch.no_grad()
def standardize_all(network: nn.Module) -> None:
    """Standardises every kernel of more than one weight, in place."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and module.weight[0].numel() > 1:
            standardize(module.weight, variance=True)


class Turns:
    """Lets processes take turns: each waits for its own semaphore and hands over to the next that still runs."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._gates = [context.Semaphore(1 if i == 0 else 0) for i in range(number)]
        self._running = context.Array("b", [1] * number)

    def wait(self, own: int) -> None:
        """Blocks until it is this process's turn."""
        self._gates[own].acquire()

    def hand_over(self, own: int, done: bool = False) -> None:
        """Lets the next process that still runs go on; ``done`` says that this one will not wait again."""
        if done:
            self._running[own] = 0
        number = len(self._gates)
        following = [j % number for j in range(own + 1, own + number + 1) if self._running[j % number]]
        if following:
            self._gates[following[0]].release()


class Curve(lightning.Callback):
    """Notes the accuracy on held-out images along a run, and hands over to other runs every few steps."""

    def __init__(self, x: Tensor, y: Tensor, every: int, note: Any, turns: Turns | None, own: int) -> None:
        self.x, self.y, self.every, self.note, self.turns, self.own = x, y, every, note, turns, own
        self.cpu, self._since, self._before = 0.0, 0.0, 0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._begin_turn()

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: Any, *_: Any) -> None:
        step = trainer.global_step
        if step == self._before:
            return
        self._before = step
        last = step == trainer.max_steps
        if step % self.every == 0 or last:
            self.cpu += time.process_time() - self._since
            self._note(trainer, pl_module, step, len(self.x) if last else FEW_ROWS)
            self._since = time.process_time()
        if step % TURN == 0 and not last:
            self.cpu += time.process_time() - self._since
            if self.turns is not None:
                self.turns.hand_over(self.own)
            self._begin_turn()

    def _begin_turn(self) -> None:
        if self.turns is not None:
            self.turns.wait(self.own)
        self._since = time.process_time()

    def _note(self, trainer: Any, pl_module: Any, step: int, rows: int) -> None:
        own, average = self._accuracy(pl_module, rows), trainer.strategy.average
        average.show(pl_module.network)
        try:
            averaged = self._accuracy(pl_module, rows)
        finally:
            average.hide()
        self.note(step, self.cpu, rows, own, averaged)

    @torch.no_grad()
    def _accuracy(self, pl_module: Any, rows: int) -> float:
        training, found = pl_module.training, []
        pl_module.eval()
        for part in self.x[:rows].split(500):
            found.append(pl_module(part).argmax(1))
        pl_module.train(training)
        return float((torch.cat(found) == self.y[:rows]).double().mean())


def train(
    method: str, steps: int, batch: int, note: Any, turns: Turns | None = None, own: int = 0, **options: Any
) -> Curve:
    """Trains one method; ``note`` is called with step, processor time, rows and both accuracies."""
    torch.set_num_threads(1)
    experiment: Experiment = prepare(config(method, steps, batch, **options)).experiment
    data = experiment.datamodule
    data.setup()
    x, y = data.load_test() if not options.get("held_out") else (data._validation.x, data._validation.y)
    curve = Curve(data.transform_batch(x), y.long(), max(1, steps // NOTES), note, turns, own)
    callbacks: list[Any] = experiment.trainer.callbacks  # type: ignore[attr-defined]
    if method != "exact norms":
        standardize_all(experiment.model.network)
        callbacks.append(Standardized())
    callbacks.append(curve)
    experiment.trainer.limit_val_batches = 0
    experiment.trainer.fit(experiment.model, datamodule=data)
    return curve


def _arm(method: str, steps: int, batch: int, path: Path, turns: Turns, own: int, options: dict[str, Any]) -> None:
    """Runs as the process of one method."""

    def note(step: int, cpu: float, rows: int, accuracy: float, averaged: float) -> None:
        with path.open("a", encoding="utf-8", newline="") as file:
            row = (method, step, steps, f"{cpu:.2f}", rows, f"{accuracy:.4f}", f"{averaged:.4f}")
            csv.writer(file, lineterminator="\n").writerow(row)

    try:
        train(method, steps, batch, note, turns, own, **options)
    finally:
        turns.hand_over(own, done=True)


def run_in_turns(methods: Sequence[str], steps: int, batch: int, path: Path, **options: Any) -> None:
    """Trains the methods in turns, each in its own process, and writes their notes."""
    path.write_text(",".join(FIELDS) + "\n", encoding="utf-8")
    turns, context = Turns(len(methods)), multiprocessing.get_context("spawn")
    arms = [
        context.Process(target=_arm, args=(method, steps, batch, path, turns, own, options))
        for own, method in enumerate(methods)
    ]
    for arm in arms:
        arm.start()
    for arm in arms:
        arm.join()


def read_notes(path: Path) -> dict[str, list[dict[str, float]]]:
    """Returns the notes of each method."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found[row.pop("method")].append({name: float(value) for name, value in row.items()})
    return dict(found)


def table(notes: dict[str, list[dict[str, float]]]) -> str:
    """Returns the last notes as Markdown, with processor time in units of the first method's."""
    lines = [
        "| method | steps | processor time | test accuracy, last weights | averaged weights |",
        "|---|---:|---:|---:|---:|",
    ]
    each = {method: rows[-1]["cpu_seconds"] / rows[-1]["step"] for method, rows in notes.items()}
    first = next(iter(each.values()))
    for method, rows in notes.items():
        last = rows[-1]
        accuracies = [f"{100 * last[name]:.1f}" for name in ("accuracy", "average_accuracy")]
        cells = [method, f"{last['step']:.0f}", f"{each[method] / first:.2f}", *accuracies]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(notes: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Draws the accuracy of the averaged weights against steps, and against processor time."""
    from ..report.figure_style import COLOURS, WIDTH, figure_to_png, label_axes, legend, new_axes_grid

    title = "WideResNet-10-1 on CIFAR-10 at 16 x 16, epsilon 8"
    figure, ((by_step, by_time),) = new_axes_grid(title, (1, 2), height=3.2, width=1.6 * WIDTH, sharey=True)
    colours = [COLOURS.first, COLOURS.second, COLOURS.muted, COLOURS.ink]
    for (method, rows), colour in zip(notes.items(), colours, strict=False):
        accuracies = [100 * row["average_accuracy"] for row in rows]
        by_step.plot([row["step"] for row in rows], accuracies, color=colour, label=method)
        by_time.plot([row["cpu_seconds"] / 60 for row in rows], accuracies, color=colour)
    label_axes(by_step, "step", "test accuracy in %")
    label_axes(by_time, "processor time in minutes")
    legend(by_step, columns=3)
    path.write_bytes(figure_to_png(figure))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="CSV file of the curves, which is written anew")
    parser.add_argument("--figure", type=Path, help="PNG file of the curves in --output")
    parser.add_argument("--steps", type=int, default=500, help="steps of every method (default 500)")
    parser.add_argument("--batch", type=int, default=256, help="expected examples in a step (default 256)")
    parser.add_argument("--time", action="store_true", help="take 30 steps of every method in turns, and train none")
    own = parser.parse_args()
    if own.output is None and not own.time:
        parser.error("--output is needed, or --time")
    if own.time:
        path = own.output or Path("wide_evidence_time.csv")
        run_in_turns(tuple(METHODS), 30, own.batch, path)
    else:
        path = own.output
        if not path.exists():
            run_in_turns(TRAINED, own.steps, own.batch, path)
    notes = read_notes(path)
    if own.figure:
        draw(notes, own.figure)
    sys.stdout.write(f"{table(notes)}\n")


if __name__ == "__main__":
    main()
