"""Releases curves of the finished model on private validation rows, once: ROC, reliability, Hosmer-Lemeshow."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from lipdp_lightning.bound_text import upper_text
from lipdp_lightning.callbacks.accountant import _strategy
from lipdp_lightning.callbacks.parameter_averaging import averaging_of
from lipdp_lightning.curves import (
    Grid,
    NoiseSource,
    ReleaseList,
    curve_mechanism,
    private_hosmer_lemeshow,
    private_reliability,
    private_roc,
)
from lipdp_lightning.curves.columns import write_new
from lipdp_lightning.curves.curve_plots import plot_hosmer_lemeshow, plot_reliability, plot_roc
from lipdp_lightning.extras import require
from lipdp_lightning.report.figure_style import figure_to_png
from lipdp_lightning.training.predictions import class_scores, predict_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORD = "private_curves.json"
CURVES = ("roc", "reliability", "hosmer_lemeshow")
_PRINT_SHARE = "the epsilons of all releases below add up; they are not part of the training ledger"


class PrivateValidationCurves(Callback):
    """Releases curves of the model on PRIVATE validation rows, with their own budget, after the plan's steps.

    The validation rows are other records than the training rows (a split by record keeps them so), and the curves
    are functions of them and of the released model. Under add/remove a record is therefore protected by the epsilon
    of the part it is in, training or validation; under replace-one, where a record may move from one part to the
    other, by the sum of both. The releases are pure DP events and not part of the ledger of training steps: they are
    listed, with their sum, in private_curves.json and in the report's notes.

    Two classes give a ROC curve, its area, a reliability diagram and a Hosmer-Lemeshow test. For more classes the
    last two compare the confidence in the predicted class with its accuracy, and there is no ROC curve.

    The exact metrics of a validation loop on these rows would not be private, so `limit_val_batches` must be 0.

    Args:
        epsilon: the budget of all curves together, under the plan's relation; it is divided equally.
        directory: the folder of the files; None takes the trainer's `default_root_dir`, with `lipdp fit` the run
            directory.
        curves: the names of the curves; by default all that apply.
        levels: the curves have 2^levels thresholds.
        bins: the number of bins of the reliability diagram.
        groups: the number of groups of the Hosmer-Lemeshow test.
        mechanism: 'factorization' or 'laplace', see `lipdp_lightning.curves.mechanism`.
        exact_metrics: whether to allow a validation loop; the report says that its metrics are not covered.
        fixed_secret: a secret for tests.
    """

    def __init__(
        self,
        epsilon: float,
        directory: str | Path | None = None,
        curves: Sequence[str] = CURVES,
        levels: int = 8,
        bins: int = 10,
        groups: int = 10,
        mechanism: str = "factorization",
        exact_metrics: bool = False,
        fixed_secret: bytes | None = None,
    ) -> None:
        problems = [f"epsilon {epsilon} is not a positive finite number."] * (not 0 < epsilon < math.inf)
        problems += [f"curve {name!r} is unknown." for name in curves if name not in CURVES]
        problems += ["no curve is asked for."] * (not curves)
        problems += [f"mechanism {mechanism!r} is not laplace or factorization."] * (
            mechanism not in ("laplace", "factorization")
        )
        problems += [f"{bins} bins or {groups} groups are too few."] * (bins < 1 or groups < 2)
        if problems:
            raise ValueError(
                f"{' '.join(problems)} HINT: use PrivateValidationCurves(epsilon=1.0, curves={list(CURVES)})."
            )
        Grid(0.0, 1.0, levels)
        self.epsilon, self.levels, self.bins, self.groups = epsilon, levels, bins, groups
        self.curves, self.mechanism, self.exact_metrics = tuple(dict.fromkeys(curves)), mechanism, exact_metrics
        self.directory = None if directory is None else Path(directory)
        self._secret = fixed_secret
        self.content: dict[str, Any] | None = None
        self.figures: dict[str, Figure] = {}

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Refuses settings that would make the release worthless or impossible, before training."""
        require("matplotlib", "PrivateValidationCurves")
        problems = []
        task = getattr(pl_module, "task", None)
        if task not in ("binary", "classification"):
            problems.append(f"curves need class probabilities, and the task is {task!r}.")
        plan = _strategy(trainer).plan
        if plan is not None and plan.unit != "example":
            problems.append("a curve's noise covers one row, and the plan protects a group of rows.")
        if not self._rows(trainer):
            problems.append("the data has no validation rows; set validation_fraction.")
        if trainer.limit_val_batches != 0 and not self.exact_metrics:
            problems.append(
                "the validation loop would publish exact metrics of the private validation rows; "
                "set trainer.limit_val_batches to 0, or exact_metrics=True."
            )
        if problems:
            raise ValueError(f"PrivateValidationCurves: {' '.join(problems)}\nHINT: see docs/curves.md, 'In a run'.")

    @staticmethod
    def _rows(trainer: lightning.Trainer) -> Any:
        data = trainer.datamodule  # type: ignore[attr-defined]
        return None if data is None else data.val_dataloader()

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if not trainer.is_global_zero or trainer.global_step < _strategy(trainer).branches.limit():
            return  # an unfinished run may be continued, and every release of its curves would be charged
        directory = Path(trainer.default_root_dir) if self.directory is None else self.directory
        record = directory / RECORD
        if record.exists():
            self.content = json.loads(record.read_text())  # an earlier release is shown again, not drawn again
            return
        content = self._release(trainer, pl_module)
        files = {RECORD: (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()}
        files |= {f"private_{name}.png": figure_to_png(figure) for name, figure in self.figures.items()}
        write_new(directory, files)
        self.content = content
        self._publish(trainer)

    def _release(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> dict[str, Any]:
        plan = _strategy(trainer).plan
        assert plan is not None
        averaging = averaging_of(trainer)
        with nullcontext() if averaging is None else averaging.averaged(module):  # the evaluated weights
            scores, labels, binary = self._predictions(trainer, module)
        wanted = [name for name in self.curves if name != "roc" or binary]
        if not wanted:
            raise ValueError("an ROC curve needs two classes. HINT: use curves=['reliability', 'hosmer_lemeshow'].")
        share, relation, source = self.epsilon / len(wanted), plan.adjacency, NoiseSource(self._secret)
        releases, results = ReleaseList(), dict[str, Any]()
        if "roc" in wanted:
            design = curve_mechanism(self.mechanism, self.levels, share, 0.0, relation, curves=2)
            roc = private_roc(scores, labels, Grid(0.0, 1.0, self.levels), design, source)
            interval = roc.auc_interval()
            releases.record(roc.booking())
            self.figures["roc"] = plot_roc(roc, interval)
            results["auc"], results["auc_interval"] = roc.auc(), list(interval)
        if "reliability" in wanted:
            diagram = private_reliability(scores, labels, share, source, self.bins, relation)
            releases.record(diagram.release)
            self.figures["reliability"] = plot_reliability(diagram)
            results["calibration_error"] = diagram.expected_error()
            results["reliability"] = {"predicted": diagram.predicted.tolist(), "observed": diagram.observed.tolist()}
        if "hosmer_lemeshow" in wanted:
            test = private_hosmer_lemeshow(
                scores, labels, share, source, self.groups, self.levels, relation, self.mechanism
            )
            for release in test.releases:
                releases.record(release)
            self.figures["hosmer_lemeshow"] = plot_hosmer_lemeshow(test)
            results["hosmer_lemeshow"], results["hosmer_lemeshow_p"] = test.statistic, test.p_value()
        about = "score: probability of class 1" if binary else "score: confidence; positive: prediction is right"
        return {
            "data": "private validation rows, disjoint from the training rows", "adjacency": relation,
            "about": about, "secret_fixed": self._secret is not None, "privacy": releases.to_dict(), "results": results,
        }  # fmt: skip

    def _predictions(self, trainer: lightning.Trainer, module: Any) -> tuple[np.ndarray, np.ndarray, bool]:
        """Returns scores in [0, 1], labels 0/1, and whether the task itself has two classes."""
        outputs, y, _ = predict_rows(module, trainer.datamodule, self._rows(trainer))  # type: ignore[attr-defined]
        logits, binary = class_scores(module, outputs), True
        if module.task == "binary":
            score, label = logits.sigmoid(), y.reshape(-1) > 0.5
        elif logits.shape[1] == 2:
            score, label = logits.softmax(1)[:, 1], y == 1
        else:
            binary = False
            score, predicted = logits.softmax(1).max(1)
            label = predicted == y
        # a row without a finite score counts as undecided, which changes no other row
        return torch.nan_to_num(score, nan=0.5).clamp(0, 1).numpy(), label.numpy(), binary

    def _publish(self, trainer: lightning.Trainer) -> None:
        assert self.content is not None
        results = {f"private_validation/{k}": v for k, v in self.content["results"].items() if isinstance(v, float)}
        results["private_validation/epsilon"] = self.content["privacy"]["epsilon_sum"]
        for logger in trainer.loggers:
            logger.log_metrics(results, step=trainer.global_step)
            if hasattr(logger, "log_image"):
                for name, figure in self.figures.items():
                    figure.canvas.draw()
                    picture = np.asarray(figure.canvas.buffer_rgba())[..., :3]  # type: ignore[attr-defined]
                    logger.log_image(key=f"private_validation/{name}", images=[picture])

    def report_notes(self) -> list[str]:
        """Returns lines for the report: the releases, each with its epsilon, and their sum."""
        if self.content is None:
            return ["the private validation curves were not released: the plan's steps are not all taken"]
        privacy, results = self.content["privacy"], self.content["results"]
        values = ", ".join(f"{name} {value:.4g}" for name, value in results.items() if isinstance(value, float))
        relation = self.content["adjacency"]
        together = (
            "a record is in the training or in the validation part, and has the epsilon of its part"
            if relation == "add_remove"
            else "a replaced record may move from one part to the other: its epsilon is the sum of both parts'"
        )
        lines = [
            f"private validation curves: epsilon {upper_text(privacy['epsilon_sum'], 6)} in all, delta 0, {relation}, "
            f"on rows disjoint from the training rows; {_PRINT_SHARE}; {together}",
            *(
                f"private validation release {r['name']}: epsilon {upper_text(r['epsilon'], 6)}"
                for r in privacy["releases"]
            ),
            f"private validation results, with noise: {values}",
        ]
        if self.content["secret_fixed"]:
            lines.append("the secret of the private validation curves was fixed for a test: the noise can be removed")
        if self.exact_metrics:
            lines.append("the exact validation metrics are functions of the same private rows, and are not covered")
        return lines
