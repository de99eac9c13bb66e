"""Compares certified scalings and allocations by training: learning rate on held-out rows, then seeds.

    python -m lipdp_lightning.studies.scaling_comparison --output scalings.json
        [--networks linear mlp conv] [--scalings exact]

Every combination gets the same budget, network, data and number of learning rates. Rates are chosen on rows held out
from the training set with seed 0; the accuracy reported is that of other seeds on the published test rows. The search
is not part of the accounted budget.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import warnings
from collections.abc import Callable
from typing import Any

import lightning
import torch
from torch import nn

from ..bounds.losses import CrossEntropy
from ..data_modules import FashionMNIST
from ..models import MLP, GaborNet
from ..privacy.plan import PrivacyPlan
from ..report.atomic import write_atomically
from ..training import PrivateModule, PrivateStrategy

SHAPE = (1, 28, 28)
COMBINATIONS = (
    ("worst_case", "equal"), ("worst_case", "global"), ("worst_case", "optimal"),
    ("layerwise", "equal"), ("layerwise", "global"), ("layerwise", "optimal"),
    ("joint", "equal"), ("joint", "global"), ("joint", "optimal"),
    ("exact", "global"), ("exact", "optimal"), ("exact_layerwise", "global"), ("exact_layerwise", "optimal"),
)  # fmt: skip
RADIUS = 0.1  # radius of the exact scalings; most gradients are longer and end with the same norm
# (network, largest layer norm, temperature, learning rates)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], float | None, float, tuple[float, ...]]] = {
    "linear": (lambda: MLP(SHAPE, 10, bias=False, zero_init=True), None, 1.0, (0.03, 0.1, 0.3)),
    "mlp": (lambda: MLP(SHAPE, 10, (64,), bias=False), 1.0, 0.03, (0.001, 0.003, 0.009)),
    "conv": (lambda: GaborNet(SHAPE, 10, norm_groups=0), 1.0, 0.1, (0.003, 0.01, 0.03)),
}


def train(network: str, scaling: str, allocation: str, rate: float, seed: int, options: argparse.Namespace) -> float:
    """Returns the held-out accuracy of one run: validation rows for seed 0, test rows for the others."""
    torch.manual_seed(seed)
    build, max_norm, temperature, _ = NETWORKS[network]
    data = FashionMNIST(validation_fraction=0.1 if seed == 0 else 0.0)
    data.setup()
    plan = PrivacyPlan.create(
        dataset_size=data.dataset_size, expected_batch_size=options.batch_size, epochs=options.epochs,
        epsilon=options.epsilon, delta=1e-5, accountant="pld", scaling=scaling, allocation=allocation,
        max_norm=max_norm, radius=RADIUS if scaling.startswith("exact") else None,
    )  # fmt: skip
    module = PrivateModule(
        build(),
        loss=CrossEntropy(temperature=temperature),
        input_mode="normalize",
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=rate),
    )
    trainer = lightning.Trainer(
        strategy=PrivateStrategy(plan), max_steps=plan.steps, max_epochs=-1, accelerator="cpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, num_sanity_val_steps=0, check_val_every_n_epoch=10**6,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    accuracy = float(trainer.validate(module, datamodule=data, verbose=False)[0]["validation/accuracy"])
    del trainer, module, data
    gc.collect()  # trainer and data refer to each other and hold the whole data set
    return accuracy


def standard_error(found: list[float]) -> float | None:
    """Returns the standard error of a mean; None for a single value, which has none."""
    return statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else None


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for network in options.networks:
        rates = NETWORKS[network][3]
        for scaling, allocation in COMBINATIONS:
            if network == "linear" and allocation != "global":
                continue  # with one group, every allocation is the same
            if options.scalings and scaling not in options.scalings:
                continue
            chosen = max(rates, key=lambda r: train(network, scaling, allocation, r, 0, options))
            found = [train(network, scaling, allocation, chosen, seed, options) for seed in options.seeds]
            row = {
                "network": network, "scaling": scaling, "allocation": allocation, "learning_rate": chosen,
                "test_accuracy": statistics.mean(found),
                "standard_error": standard_error(found), "seeds": len(found),
            }  # fmt: skip
            rows.append(row)
            # after every row, so that an interrupted comparison keeps its results
            write_atomically(options.output, json.dumps({"options": vars(options), "rows": rows}, indent=1))
            sys.stderr.write(json.dumps(row) + "\n")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, help="JSON file to write")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS), help="networks")
    parser.add_argument("--scalings", nargs="+", choices=sorted({s for s, _ in COMBINATIONS}), help="all by default")
    parser.add_argument("--epochs", type=float, default=10, help="epochs of each run")
    parser.add_argument("--batch-size", type=int, default=4096, help="expected batch size")
    parser.add_argument("--epsilon", type=float, default=3.0, help="epsilon of each run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="seeds of the final runs")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    compare(options)


if __name__ == "__main__":
    main()
