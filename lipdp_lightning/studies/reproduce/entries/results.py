"""Reproduces accuracy at epsilon 3 on fixed features: one linear layer with and without clipping, and DP-SGD."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lipdp_lightning.studies.reproduce.entry import Cell, Claim, Entry, Options, Row, Rows, Value
from lipdp_lightning.studies.reproduce.output import Output
from lipdp_lightning.studies.reproduce.summary import mean_and_deviation, number, summarize

CONFIGS = Path(__file__).parents[4] / "configs"
FILES = {
    "MNIST": "mnist_scattering_linear",
    "Fashion-MNIST": "fashion_mnist_scattering_linear",
    "CIFAR-10": "cifar10_scattering_patches_linear",
}
# Tramer and Boneh 2021, table 1: a linear model on scattering features, epsilon 3, delta 1e-5
PUBLISHED = {"MNIST": 98.7, "Fashion-MNIST": 89.7, "CIFAR-10": 67.0}
UNCLIPPED, CLIPPED, DPSGD = "no clipping", "loss_clip", "DP-SGD, flat clipping"
METHODS = (UNCLIPPED, CLIPPED, DPSGD)
SEEDS, QUICK_STEPS = 3, 2


def cells(options: Options) -> list[Cell]:
    short: dict[str, Value] = {"steps": QUICK_STEPS} if options.quick else {}
    return [
        {"data": data, "method": method, "seed": seed, **short}
        for seed in options.seed_range(
            SEEDS
        )  # the outermost loop, so that an interrupted run has some rows of every method
        for method in METHODS
        for data in FILES
    ]


def configuration(data: str, method: str) -> tuple[Path, dict[str, Any]]:
    """Returns the file of a method; DP-SGD changes in that of loss_clip who clips, and nothing else."""
    file = CONFIGS / f"{FILES[data]}{'_unclipped' if method == UNCLIPPED else ''}.yaml"
    if not file.exists():
        raise ValueError(f"there is no file {file}. HINT: run it from a checkout of the repository.")
    if method != DPSGD:
        return file, {}
    import yaml

    radius = yaml.safe_load(file.read_text())["privacy"]["loss_clip"]
    # the gradient of a row of norm 1 has the norm of the loss's gradient in the logits
    return file, {"privacy.method": "dpsgd_ghost", "privacy.clip_norm": radius, "privacy.loss_clip": None}


def run(cell: Cell) -> Row:
    return train(cell, {})


def train(cell: Cell, changes: dict[str, Any]) -> Row:
    """Returns the row of a cell's data, method and seed, with changes of the configuration."""
    from lipdp_lightning.experiment import run_once

    data, method = str(cell["data"]), str(cell["method"])
    file, own = configuration(data, method)
    changes = own | changes
    if cell.get("steps") is not None:
        changes |= {"privacy.steps": cell["steps"], "privacy.epsilon": None, "privacy.noise_multiplier": 1.0}
    secret = hashlib.sha256(f"{data}, {method}, {cell['seed']}".encode()).digest()[:16]
    found = run_once(file, changes, secret=secret)
    return {
        "accuracy": 100 * found.score,
        "certified_epsilon": found.epsilon,
        "delta": found.plan.delta,
        "adjacency": found.plan.adjacency,
        "noise_multiplier": found.plan.noise_multiplier,
        "seconds": round(found.seconds, 1),
    }


def finish(rows: Rows, out: Output) -> str:
    return (
        "Test accuracy in percent at delta 1e-5, add/remove adjacency, PLD. Epsilon covers the private means and all "
        "steps. Sampling and noise follow the seed here, so that the table can be made again; a private run draws its "
        "secret. Step size, steps, slope and clipping radius were chosen on a hashed tenth of the training rows; that "
        "search is not accounted for. With one trained layer and inputs of norm 1, `loss_clip` is DP-SGD's flat "
        "clipping: the two columns differ by their random draws alone."
    )


def table(rows: Rows) -> Sequence[Row]:
    by = ("data", "method", "certified_epsilon", "delta", "adjacency")
    found = []
    for row in summarize(rows, by, ["accuracy", "seconds"]):
        runs = number(row["runs"])
        kept = {name: value for name, value in row.items() if name not in ("accuracy (sd)", "seconds (sd)")}
        if "accuracy (sd)" in row:
            kept["standard error"] = round(number(row["accuracy (sd)"]) / math.sqrt(runs), 3)
        found.append(kept | {"accuracy": round(number(row["accuracy"]), 2), "seconds": round(number(row["seconds"]))})
    return found


def _ours(data: str) -> Any:
    def accuracy(rows: Rows) -> str:
        parts = []
        for method in METHODS:
            values = [number(row["accuracy"]) for row in rows if (row["data"], row["method"]) == (data, method)]
            parts.append(f"{method} {mean_and_deviation(values)[0]:.2f} %" if values else f"{method}: not run")
        return ", ".join(parts)

    return accuracy


ENTRY = Entry(
    name="results",
    title="Accuracy on fixed features at epsilon 3",
    source="the configurations of this repository",
    expected_time="2 hours",
    cells=cells,
    run=run,
    finish=finish,
    claims=[
        Claim(
            f"{data}, linear model on scattering features, epsilon 3",
            f"{accuracy} % (Tramer and Boneh 2021, DP-SGD)",
            _ours(data),
        )
        for data, accuracy in PUBLISHED.items()
    ],
    data=[
        f"{name}/raw/{part}-{kind}-ubyte"
        for name in ("MNIST", "FashionMNIST")
        for part in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    ],
    table=table,
)
