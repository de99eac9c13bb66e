"""Runs to report on: a healthy one, one stopped early, one that is not private, one with nothing in it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from lipdp_lightning.report.model import RunFacts

LAYERS = (
    ("stem.conv", 448, 28.02, 1.414, 1.0),
    ("stage1.block0.residual.branch.conv1", 2320, 28.05, 1.414, 0.995),
    ("stage1.block0.residual.branch.conv2", 2320, 27.91, 1.414, 1.0),
    ("stage2.conv", 4640, 19.7, 1.414, 1.0),
    ("stage2.dense", 50240, 14.2, 1.414, 0.81),
    ("head", 650, 9.87, 1.414, 2.31),
)
NOISE_MULTIPLIER = 1.1


def layer_groups() -> list[dict[str, Any]]:
    deltas = [cotangent * (index + 1) / 2 for index, (_, _, _, cotangent, _) in enumerate(LAYERS)]
    total = sum(delta * math.sqrt(row[1]) for delta, row in zip(deltas, LAYERS, strict=True))
    groups = []
    for delta, (name, count, bound, cotangent, norm) in zip(deltas, LAYERS, strict=True):
        free = name == "head"
        groups.append(
            {
                "name": name,
                "parameters": count,
                "delta": delta,
                "noise_std": NOISE_MULTIPLIER * math.sqrt(total * delta / math.sqrt(count)),
                "lipschitz": norm,
                "input_bound": bound,
                "cotangent_bound": cotangent,
                "weight_norm": norm,
                "max_norm": None if free else 1.0,
                "on_boundary": None if free else norm >= 0.999,
            }
        )
    return groups


def history(steps: int, rows: int = 12) -> list[dict[str, Any]]:
    result = []
    for index in range(1, rows + 1):
        step = steps * index // rows
        result.append(
            {
                "step": step,
                "epsilon": 2.392 * math.sqrt(step / 14062),
                "val_accuracy": 0.972 - 0.3 * math.exp(-step / 2500),
                "val_loss": 0.1 + math.exp(-step / 2500),
                "gradient_to_noise": 1.6 * math.exp(-step / 9000) + 0.15,
            }
        )
    return result


def healthy(**changes: Any) -> RunFacts:
    facts = RunFacts(
        title="Fashion-MNIST, small residual network",
        created="2026-03-14 09:26 UTC",
        certified=True,
        epsilon=2.39185,
        epsilon_taken=2.39185,
        epsilon_lower=2.37188,
        epsilon_upper=2.39185,
        delta=1e-5,
        adjacency="add_remove",
        noise_multiplier=NOISE_MULTIPLIER,
        sample_rate=256 / 60000,
        dataset_size=60000,
        expected_batch_size=256,
        steps_planned=14062,
        steps_taken=14062,
        accountant="prv",
        scaling="layerwise",
        allocation="optimal",
        projection="clip",
        loss_clip=None,
        secret_fixed=False,
        groups=layer_groups(),
        metrics={"val_accuracy": 0.9709, "val_loss": 0.1036, "train_loss": 0.2213},
        metric_sources={"val_accuracy": "validation", "val_loss": "validation", "train_loss": "private"},
        nonprivate_released=["train_loss: mean loss over the training records, requested by log_nonprivate"],
        versions={"lipdp-lightning": "0.1.0", "torch": "2.9.0", "lightning": "2.6.1", "python": "3.11.7"},
        history=history(14062),
        ledger=[
            {
                "mechanism": "poisson_gaussian",
                "parameters": {"sample_rate": 256 / 60000, "noise_multiplier": 1.1},
                "count": 14062,
            }
        ],
        notes=["The validation split was fixed before training, record by record."],
        config="model:\n  class_path: models.SmallResNet\nprivacy:\n  epsilon: 2.4\n  delta: 1.0e-05\n",
    )
    return dataclasses.replace(facts, **changes)


def stopped_early(**changes: Any) -> RunFacts:
    return healthy(
        **{
            "title": "Adult income, two layers",
            "steps_taken": 4000,
            "epsilon_taken": 1.2757,
            "history": history(4000, 6),
            "adjacency": "replace_one",
            "secret_fixed": True,
            "nonprivate_released": [],
            "metrics": {"val_accuracy": 0.9114},
            "metric_sources": {"val_accuracy": "public"},
            **changes,
        }
    )


def not_private(**changes: Any) -> RunFacts:
    return healthy(
        **{
            "title": "MNIST, reproduction with a batch maximum",
            "certified": False,
            "epsilon": 2.39185,
            "scaling": "batch_max",
            "config": "privacy:\n  scaling: batch_max\n  noise_multiplier: 1.1\n",
            **changes,
        }
    )


def empty(**changes: Any) -> RunFacts:
    """A certified run that recorded nothing but its plan."""
    return healthy(
        **{
            "groups": [],
            "metrics": {},
            "metric_sources": {},
            "history": [],
            "ledger": [],
            "notes": [],
            "versions": {},
            "nonprivate_released": [],
            "config": "",
            "created": "",
            **changes,
        }
    )
