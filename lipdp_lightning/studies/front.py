"""Compares exact norms and bounds with flat clipping on trained convolutions, on one network and equally tuned.

    python -m lipdp_lightning.studies.front --output front.jsonl [--methods exact flat bounds]
    python -m lipdp_lightning.studies.front --slack

Every method gets four settings on the network, data, budget and epochs of configs/fashion_mnist_conv_eps2.yaml. One is
chosen by the mean accuracy of two runs on rows held out from the training set, by a hash of each row; it is then
trained with further seeds on all training rows, and judged on the published test rows. The search is not part of the
accounted budget. Finished trainings are read from the output file, so that an interrupted run can continue.

``--slack`` trains nothing: it prints how far ||d|| n, which bounds an example's gradient in a layer, is above its norm,
for the network at its initialisation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import warnings
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from ..experiment import run_once
from ..experiment.experiment import parse_experiment
from ..layers.contribution import Contribution
from ..layers.scaled import ScaledLayer
from ..report.atomic import write_atomically
from ..report.tables import render_table

CONFIG = "configs/fashion_mnist_conv_eps2.yaml"
RATE = "optimizer.init_args.lr"
SEARCH_SEEDS = (0, 100)  # two seeds, since with one run settings half a point apart are ranked by chance

Setting = dict[str, Any]


def grid(**choices: list[Setting]) -> list[Setting]:
    """Returns all combinations of one setting from each list."""
    return [{k: v for part in parts for k, v in part.items()} for parts in itertools.product(*choices.values())]


def rates(*values: float) -> list[Setting]:
    return [{RATE: value} for value in values]


def shares(*values: float) -> list[Setting]:
    """Returns settings that give a share of the budget to the convolution."""
    return [
        {"privacy.allocation": "custom", "privacy.group_weights": {"features*": share, "head": 1 - share}}
        for share in values
    ]


# flat clipping by opacus in two passes, which hold no per-example gradients
FLAT = {"privacy.method": "dpsgd_ghost", "privacy.radius": None}
# bounds alone, without the normalisation behind the convolution, which would multiply its bound
BOUNDS = {"privacy.scaling": "joint", "privacy.radius": None, "model.network.init_args.norm_groups": 0}
METHODS: dict[str, tuple[Setting, list[Setting]]] = {
    "exact": ({}, grid(rate=rates(0.01, 0.02), share=shares(0.3, 0.5))),
    "flat": (FLAT, grid(rate=rates(0.01, 0.02), norm=[{"privacy.clip_norm": n} for n in (1.0, 10.0)])),
    "bounds": (
        BOUNDS | shares(0.15)[0],
        grid(rate=rates(0.01, 0.02), clip=[{"privacy.cotangent_clip": {"features.1": r}} for r in (0.05, 0.15)]),
    ),
}


def train(setting: Mapping[str, Any], seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the held-out accuracy of one run in per cent: of validation rows for the search, of test rows
    otherwise.
    """
    held_out = 0.1 if seed in SEARCH_SEEDS else 0.0
    overrides = {
        **setting,
        "seed_everything": seed,
        "data.init_args.validation_fraction": held_out,
        "privacy.epochs": options.epochs,
        "privacy.epsilon": options.epsilon,
    }
    # the data are public, and a fixed secret makes the run repeatable
    secret = blake2b(f"front {seed}".encode(), digest_size=16).digest()
    result = run_once(options.config, overrides, secret=secret)
    stage = "validation/accuracy" if held_out else "test/accuracy"
    accuracy = result.metrics.get(stage, result.score)
    return {"accuracy": 100 * accuracy, "epsilon": result.epsilon, "steps": result.steps, "seconds": result.seconds}


class Log:
    """Keeps one line per finished training, found again by everything that decides its result."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self._path, self._options = path, options
        lines = path.read_text().splitlines() if path.exists() else []
        self._found = {json.dumps(row["cell"], sort_keys=True): row for row in map(json.loads, lines)}

    def accuracy(self, method: str, setting: Setting, seed: int) -> float:
        budget = {"epochs": self._options.epochs, "epsilon": self._options.epsilon, "config": self._options.config}
        cell = {"method": method, "setting": setting, "seed": seed, **budget}
        key = json.dumps(cell, sort_keys=True)
        if key not in self._found:
            row = {"cell": cell, **train(METHODS[method][0] | setting, seed, self._options)}
            self._found[key] = row
            write_atomically(self._path, "".join(json.dumps(found) + "\n" for found in self._found.values()))
        return float(self._found[key]["accuracy"])


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    log, rows = Log(Path(options.output), options), []
    for method in options.methods:
        searched = [
            (statistics.mean(log.accuracy(method, setting, seed) for seed in SEARCH_SEEDS), setting)
            for setting in METHODS[method][1]
        ]
        validation, chosen = max(searched, key=lambda pair: pair[0])
        found = [log.accuracy(method, chosen, seed) for seed in options.seeds]
        error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else float("nan")
        rows.append(
            {"method": method, "chosen": chosen, "validation": validation, "test": statistics.mean(found),
             "standard_error": error, "seeds": len(found)}
        )  # fmt: skip
    return rows


def slack(config: str, rows: int = 1024) -> dict[str, float]:
    """Returns the median over published test images of ||d|| n / ||g||, by trained layer."""
    experiment = parse_experiment(["--config", config], None, "off")
    module, (x, y) = experiment.model, experiment.datamodule.load_test()
    kept: dict[str, Contribution] = {}
    bounds: dict[str, torch.Tensor] = {}
    layers = {n: m for n, m in module.network.named_modules() if isinstance(m, ScaledLayer)}
    for name, layer in layers.items():
        layer.gradient_keeper = partial(kept.__setitem__, name)
        layer.gradient_scaler = partial(bounds.__setitem__, name)
    logits = module(x[:rows] * experiment.datamodule.scale)
    module.loss.per_example(logits, y[:rows]).sum().backward()
    found = {}
    for name, contribution in kept.items():
        bound = contribution.cotangent.flatten(1).norm(dim=1) * bounds[name]
        found[name] = float((bound / contribution.norms()).median())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="file of JSON lines, one per training, kept for the next call")
    parser.add_argument("--slack", action="store_true", help="print how loose the bounds are, and train nothing")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), help="methods")
    parser.add_argument("--config", default=CONFIG, help="the experiment's YAML file")
    parser.add_argument("--epochs", type=float, default=15, help="epochs of each run")
    parser.add_argument("--epsilon", type=float, default=2.0, help="epsilon of each run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="seeds of the final runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if options.slack:
        ratios = [[name, f"{ratio:.1f}"] for name, ratio in slack(options.config).items()]
        sys.stdout.write(render_table(["layer", "bound / norm"], ratios) + "\n")
        return
    if options.output is None:
        parser.error("--output is needed; it names the file that finished trainings are kept in")
    numbers = ("validation", "test", "standard_error")
    cells = [[r["method"], *(f"{r[n]:.2f}" for n in numbers), json.dumps(r["chosen"])] for r in compare(options)]
    sys.stdout.write(render_table(["method", "validation", "test", "standard error", "chosen"], cells) + "\n")


if __name__ == "__main__":
    main()
