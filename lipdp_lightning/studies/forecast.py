"""Compares forecasts with real runs: who is told that a run will learn, and who is told that it will not.

    python -m lipdp_lightning.studies.forecast --output cells.jsonl [--only NAME] [--short]

Every cell is a network, a data set, a scaling and an epsilon. Its forecast is made first, from made-up rows; then it is
trained by ``lipdp fit``'s engine, with a secret of its own, and evaluated on held-out rows. A run has learned if its
accuracy is above twice chance, and that is also what the forecast says of its own made-up rows: no threshold is fitted.
Cells that the file holds are kept, so that a study which was interrupted goes on. MNIST is left out without LIPDP_DATA.
``--short`` compares the runs with the smallest forecasts, which very large networks get.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bound_text import upper_text
from ..experiment.short_training import prepare
from ..forecast import forecast
from ..forecast.public_training import FEWEST_ROWS, FEWEST_STEPS, Size

NETWORKS: dict[str, dict[str, Any]] = {
    "Linear": {"bias": False},
    "MLP": {"hidden": [64]},
    "MLP, four layers": {"hidden": [64, 64, 64]},
    "NormPreservingMLP": {"hidden": [32]},
    "ConvNet": {},
    "ShallowVGG": {"widths": [16, 32, 64], "pooling_name": "average", "norm_groups": 4},
    "ResNet": {"widths": [8, 16], "norm_groups": 4},
    "WideResNet": {"depth": 10, "width": 1},
    "MLPMixer": {"patch_size": 2, "width": 32, "depth": 1},
    "GaborNet": {"kernel_size": 4, "stride": 2, "width": 16},
}
ON_VECTORS = ("Linear", "MLP", "MLP, four layers")
ON_MNIST = ("Linear", "MLP", "ConvNet", "ShallowVGG", "GaborNet")
SCALINGS: dict[str, dict[str, Any]] = {
    "auto": {},
    "joint": {"scaling": "joint"},
    "joint, free": {"scaling": "joint", "max_norm": None},
    "layerwise": {"scaling": "layerwise"},
    "worst_case": {"scaling": "worst_case", "allocation": "global"},
}
ON_IMAGES = (
    ("auto", 3), ("auto", 0.3), ("auto", 0.05), ("joint", 3), ("joint", 30), ("joint, free", 3), ("layerwise", 3),
    ("worst_case", 8),
)  # fmt: skip
ON_TABLES = (("auto", 3), ("auto", 0.5), ("auto", 0.2), ("joint", 3), ("joint", 30), ("layerwise", 8))
DATA: dict[str, dict[str, Any]] = {
    "Digits": {"shape": [1, 8, 8], "outputs": 10, "mode": "normalize", "bound": 1.0},
    "EmbeddedWine": {"shape": [13], "outputs": 3, "mode": "clip", "bound": 4.0},
    "MNIST": {"shape": [1, 28, 28], "outputs": 10, "mode": "normalize", "bound": 1.0},
}
BUDGETS: dict[str, dict[str, Any]] = {
    "Digits": {"epochs": 20, "batch_size": 360, "delta": 1e-4},
    "EmbeddedWine": {"epochs": 40, "batch_size": 60, "delta": 1e-3},
    "MNIST": {"steps": 30, "batch_size": 1000, "delta": 1e-6},
}


@dataclass(frozen=True)
class Cell:
    """One run, and what its forecast says of it."""

    network: str
    data: str
    scaling: str
    epsilon: float

    @property
    def name(self) -> str:
        return f"{self.network}; {self.data}; {self.scaling}; {upper_text(self.epsilon)}"

    def config(self) -> dict[str, Any]:
        data = DATA[self.data]
        privacy = {"epsilon": self.epsilon, **BUDGETS[self.data], **SCALINGS[self.scaling]}
        if self.network == "NormPreservingMLP" and self.scaling != "auto":
            privacy["projection"] = "bjorck"
        options = {"input_shape": data["shape"], "outputs": data["outputs"], **NETWORKS[self.network]}
        network = {"class_path": f"lipdp_lightning.models.{self.network.partition(',')[0]}", "init_args": options}
        return {
            "seed_everything": 1,
            "model": {"network": network, "input_bound": data["bound"], "input_mode": data["mode"]},
            "data": {"class_path": f"lipdp_lightning.data_modules.{self.data}"},
            "privacy": privacy,
            "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.02}},
            "trainer": {"accelerator": "cpu", "devices": 1},
        }

    def run(self) -> dict[str, Any]:
        """Returns the forecast and what became of the run, each as a multiple of chance."""
        prepared = prepare(self.config())
        experiment, start = prepared.experiment, time.perf_counter()
        found = forecast(experiment.model, experiment.plan, experiment.datamodule)
        seconds = time.perf_counter() - start
        score = prepared.run().score
        return {
            "cell": self.name, "forecast": found.outcome.score, "accuracy": score, "chance": found.outcome.chance,
            "expected": found.learns, "learned": score > 2 * found.outcome.chance, "seconds": round(seconds, 2),
            "weakest": found.weakest.over_run,
        }  # fmt: skip

    def short(self, known: dict[str, Any]) -> dict[str, Any]:
        """Returns the row of a cell that was trained before, with the smallest forecast in place of its own."""
        experiment = prepare(self.config()).experiment
        size = Size(FEWEST_STEPS, FEWEST_ROWS)
        found = forecast(experiment.model, experiment.plan, experiment.datamodule, size=size)
        return known | {"forecast": found.outcome.score, "expected": found.learns}


def cells() -> Iterator[Cell]:
    """Yields the cells, those on data that ship with scikit-learn first."""
    for network in NETWORKS:
        yield from (Cell(network, "Digits", scaling, epsilon) for scaling, epsilon in ON_IMAGES)
    for network in ON_VECTORS:
        yield from (Cell(network, "EmbeddedWine", scaling, epsilon) for scaling, epsilon in ON_TABLES)
    if "LIPDP_DATA" in os.environ:
        for network in ON_MNIST:
            yield from (Cell(network, "MNIST", scaling, epsilon) for scaling, epsilon in (("auto", 1), ("joint", 1)))


def confusion(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table of what was expected and what came, and the cells in which they differ, as Markdown."""
    lines = ["| | learned | did not learn |", "|---|---:|---:|"]
    for expected, text in ((True, "expected to learn"), (False, "not expected to learn")):
        counts = [sum(r["expected"] is expected and r["learned"] is came for r in rows) for came in (True, False)]
        lines.append(f"| {text} | {counts[0]} | {counts[1]} |")
    lines += ["", "| wrong | made-up rows | held-out rows | chance |", "|---|---:|---:|---:|"]
    for row in rows:
        if row["expected"] is not row["learned"]:
            lines.append(f"| {row['cell']} | {row['forecast']:.2f} | {row['accuracy']:.2f} | {row['chance']:.2f} |")
    return "\n".join(lines)


def study(output: Path, only: str = "") -> list[dict[str, Any]]:
    """Returns the row of every cell, and appends those that the file lacks."""
    kept = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    known = {row["cell"]: row for row in kept}
    rows = []
    for cell in cells():
        if only not in cell.name:
            continue
        if cell.name not in known:
            known[cell.name] = cell.run()
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known[cell.name]) + "\n")
        rows.append(known[cell.name])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, required=True, help="file of one JSON object per cell, which is continued"
    )
    parser.add_argument("--only", default="", help="take the cells whose name holds this text, such as 'Digits; joint'")
    parser.add_argument("--short", action="store_true", help="compare the runs with the smallest forecasts")
    own = parser.parse_args()
    rows = study(own.output, own.only)
    if own.short:
        named = {cell.name: cell for cell in cells()}
        rows = [named[row["cell"]].short(row) for row in rows]
    seconds = sorted(row["seconds"] for row in rows)
    sys.stdout.write(f"{confusion(rows)}\n\n{len(rows)} cells")
    if seconds:
        sys.stdout.write(f"; a forecast took {seconds[len(seconds) // 2]:.2f} s (median), at most {seconds[-1]:.2f} s")
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
