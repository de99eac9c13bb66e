"""Defines the seven tables of paper 000 (tables 1 and 5) and thesis 5.4: data, methods, and one training of each."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lipdp_lightning.studies.reproduce.entry import Row

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class TabularSet:
    """A table as the papers use it.

    Args:
        name: the class in `data_modules`.
        published_rows: n of the papers; delta is 1/n.
        epsilon: the epsilon of the papers' row.
        claimed: accuracies of DP-SGD, Lip-DP-SGD and Fix-Lip-DP-SGD as published (000 table 1; 004 table 5.4).
        bins, crosses: choices of the search.
        bias: whether the model has a bias; a category's one-hot block makes it superfluous.
        file: its place below LIPDP_DATA.
        test: how the test rows were set aside.
        options: options of the data module.
        outputs: number of logits.
        small: whether the whole table fits a batch.
        folds: the number of choices of validation rows in the search; there are more if the rows are few.
    """

    name: str
    published_rows: int
    epsilon: float
    claimed: tuple[float, float, float]
    file: str
    bins: tuple[int, ...] = (0,)
    crosses: tuple[bool, ...] = (False,)
    bias: bool = False
    test: str = "a fifth of the rows, by a hash of their features"
    options: Settings = field(default_factory=lambda: {"test_fraction": 0.2})
    outputs: int = 1
    small: bool = False
    folds: int = 1

    @property
    def delta(self) -> float:
        return 1 / self.published_rows


SETS = {
    table.name: table
    for table in (
        TabularSet(
            "Adult",
            48_842,
            0.414,
            (0.824, 0.831, 0.804),
            "tabular/adult/adult.data",
            bins=(0, 8, 16),
            test="the published test file",
            options={},
        ),
        TabularSet(
            "Android",
            29_333,
            1.273,
            (0.951, 0.959, 0.945),
            "tabular/naticusdroid/training.csv",
            bias=True,
            test="a fifth of the labelled rows, by a hash of the column `index`",
            options={"identical": "apart"},
        ),
        TabularSet(
            "BreastCancer",
            569,
            1.672,
            (0.773, 0.798, 0.7),
            "tabular/breast_cancer_wisconsin_diagnostic/wdbc.data",
            bias=True,
            small=True,
            folds=10,
        ),
        TabularSet(
            "DefaultCredit",
            30_000,
            1.442,
            (0.809, 0.816, 0.792),
            "tabular/default_credit_card/UCI_Credit_Card.csv",
            bins=(0, 11),
        ),
        TabularSet(
            "Dropout",
            4424,
            1.326,
            (0.763, 0.819, 0.736),
            "tabular/students_dropout/data.csv",
            bins=(0, 8),
            options={"test_fraction": 0.2, "target": "dropout"},
            small=True,
            folds=10,
        ),
        TabularSet(
            "GermanCredit",
            1000,
            3.852,
            (0.735, 0.746, 0.768),
            "tabular/german_credit/german.data",
            bins=(0, 8),
            small=True,
            folds=20,
        ),
        TabularSet(
            "Nursery",
            12_960,
            1.432,
            (0.919, 0.931, 0.89),
            "tabular/nursery/nursery.data",
            crosses=(False, True),
            outputs=5,
            folds=5,
        ),
    )
}

# the name of each method in the table, after the column of the papers that it corresponds to
METHODS = {
    "nonprivate": "no privacy",
    "dpsgd": "DP-SGD, flat clipping",
    "fix_lip": "Fix-Lip-DP-SGD",
    "worst_case": "Lip-DP-SGD of paper 000, honestly composed",
    "layerwise": "Lip-DP-SGD of the thesis, in its sound form",
    "joint": "joint scaling, no clipping",
    "joint_saturating": "joint scaling and a saturating loss, no clipping",
    "joint_clip": "joint scaling and loss_clip",
}
OURS = ("joint", "joint_clip")
_LAST_LAYER = "layers.3"


def privacy(table: TabularSet, method: str, settings: Settings, dataset_size: int) -> dict[str, Any]:
    """Returns the privacy group: the papers' budget, and what the method does within it."""
    hidden = bool(settings["hidden"])
    common: dict[str, Any] = {
        "delta": table.delta,
        "steps": settings["steps"],
        "batch_size": settings["rate"] * dataset_size,
        "accountant": "pld",
    }
    if method == "nonprivate":
        return common | {"method": "nonprivate"}
    common["epsilon"] = table.epsilon
    if method == "dpsgd":
        # ghost norms give the same release; they are exact, and cheaper for several layers or outputs
        kind = "dpsgd_ghost" if hidden or table.outputs > 1 else "dpsgd_flat"
        return common | {"method": kind, "clip_norm": settings["clip"]}
    if method == "fix_lip":
        return common | {"method": "fix_lip", "max_norm": settings["radius"]}
    if method == "worst_case":
        return common | {"method": "worst_case", "max_norm": settings["radius"], "allocation": "optimal"}
    scaling: dict[str, Any] = {"scaling": "layerwise" if method == "layerwise" else "joint"}
    # a layer's norm does not enter its own bound, so the last layer is free
    scaling |= {"max_norm": settings["radius"], "free_layers": [_LAST_LAYER]} if hidden else {"max_norm": None}
    if method == "joint_clip":
        scaling["loss_clip"] = at_logits(table, settings) / settings["temperature"]
    return common | scaling


def at_logits(table: TabularSet, settings: Settings) -> float:
    """Returns where ``joint_clip`` clips the gradient in the logits over the temperature, and a loss saturates.

    With a bias, the gradient d (x, 1) of a linear model has the norm of d times the root of two.
    """
    clip: float = settings["clip"]
    return clip / math.sqrt(2) if linear(settings) and table.bias else clip


def linear(settings: Settings) -> bool:
    """Returns whether DP-SGD with flat clipping and ``joint_clip`` of these settings are one release, as inputs have
    norm 1. With one output, it is that of ``joint_saturating``, too.
    """
    return not settings["hidden"]


def configuration(table: TabularSet, method: str, settings: Settings, seed: int, fold: int | None) -> dict[str, Any]:
    """Returns one training; with a `fold` the test rows are unused, and a fifth of the others is held out by
    its name.
    """
    from ... import data_modules

    options = dict(table.options) | {"validation_fraction": 0.0}
    if fold is not None:
        options |= {"validation_fraction": 0.2} | ({"salt": f"fold {fold}"} if fold else {})
    options |= {name: settings[name] for name in ("bins", "crosses") if settings[name]}
    data = getattr(data_modules, table.name)(**options)
    network = {
        "input_shape": list(data.input_shape),
        "outputs": table.outputs,
        "hidden": settings["hidden"],
        "bias": table.bias,
        # a fixed norm cannot start at zero
        "zero_init": method != "fix_lip",
    }
    loss, of_loss = "CrossEntropy" if table.outputs > 1 else "BinaryCrossEntropy", dict[str, float]()
    if method == "joint_saturating":
        loss = "SaturatingCrossEntropy" if table.outputs > 1 else loss
        of_loss["slope"] = at_logits(table, settings)
    trainer: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
    if settings["averaging"]:
        averaging = {"class_path": "callbacks.ParameterAveraging", "init_args": {"kind": "weighted"}}
        trainer["callbacks"] = [averaging]
    return {
        "seed_everything": seed,
        "model": {
            "network": {"class_path": "lipdp_lightning.models.MLP", "init_args": network},
            "loss": {
                "class_path": f"lipdp_lightning.bounds.losses.{loss}",
                "init_args": {"temperature": settings["temperature"]} | of_loss,
            },
            "input_bound": 1.0,
            "input_mode": "normalize",
        },
        "data": {"class_path": f"data_modules.{table.name}", "init_args": options},
        "privacy": privacy(table, method, settings, data.dataset_size),
        "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": settings["lr"]}},
        "trainer": trainer,
    }


def trained(table: TabularSet, method: str, settings: Settings, seed: int, fold: int | None = None) -> dict[str, Any]:
    """Returns accuracy on held-out rows, and the guarantee; sampling and noise follow the seed, as the data is public.

    Methods of one seed draw the same examples, so that they are pairs. Their noise differs, since its key holds what is
    released.
    """
    from lipdp_lightning.experiment.short_training import prepare
    from lipdp_lightning.studies.reproduce.correct_rows import CorrectRows

    secret = hashlib.sha256(f"{table.name} {seed} {fold is not None}".encode()).digest()[:16]
    prepared, correct = prepare(configuration(table, method, settings, seed, fold), secret=secret), CorrectRows()
    prepared.experiment.trainer.callbacks.append(correct)  # type: ignore[attr-defined]
    result = prepared.run()
    return {
        # without validation rows, the test rows are evaluated instead
        "accuracy": result.score if fold is None else result.metrics["validation/accuracy"],
        "noise_multiplier": result.plan.noise_multiplier if math.isfinite(result.epsilon) else 0.0,
        "certified_epsilon": result.epsilon,
        "delta": result.plan.delta,
        "adjacency": result.plan.adjacency,
    } | ({"correct_rows": correct.text()} if fold is None else {})


def settings_text(settings: Settings) -> str:
    """Returns the settings as one cell of a CSV file, which `json.loads` inverts."""
    return json.dumps(settings, sort_keys=True)


def files() -> tuple[str, ...]:
    """Returns the files that are read below LIPDP_DATA."""
    return (*(table.file for table in SETS.values()), "tabular/adult/adult.test")


def mean(rows: Sequence[Row], column: str = "accuracy") -> float:
    return math.fsum(float(row[column]) for row in rows) / len(rows)  # type: ignore[arg-type]
