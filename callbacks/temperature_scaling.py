"""Fits one temperature after training, on public rows or with noise of its own, and stores it beside the weights."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from lipdp_lightning.bound_text import upper_text
from lipdp_lightning.calibration.temperature import GRID, check_grid, fit_temperature, private_temperature
from lipdp_lightning.callbacks.accountant import _strategy
from lipdp_lightning.callbacks.parameter_averaging import averaging_of
from lipdp_lightning.curves.columns import write_new
from lipdp_lightning.curves.discrete_noise import NoiseSource
from lipdp_lightning.data_modules.base import PrivateDataModule
from lipdp_lightning.privacy.plan import PrivacyPlan
from lipdp_lightning.training.predictions import TEMPERATURE_FILE, class_scores, predict_rows, read_temperature


class TemperatureScaling(Callback):
    """Divides the model's class scores by a temperature that is fitted when the plan's steps are done.

    With ``public_data`` it minimises the negative log-likelihood of that module's held-out rows, which the user states
    to be public; that costs no privacy. With ``epsilon`` it is chosen from a public grid by an epsilon-DP selection on
    the run's own private held-out rows (`lipdp_lightning.calibration.temperature`), once. That release is a line of
    the ledger, and its epsilon is ADDED to that of training, for either relation: model and temperature together are
    then (sum, delta)-DP in training rows and held-out rows alike, by basic composition. The report's epsilon is
    this sum from the first step on, because the release is planned.

    The temperature is kept in temperature.json of the run directory. Evaluations and predictions of the module, `lipdp
    test` and `lipdp export` use it.

    Args:
        public_data: a data module whose held-out rows (`test_dataloader`) are public.
        epsilon: the budget of the selection on private rows; give either this or public_data.
        temperatures: the grid of the selection; by default 65 from 1/16 to 16, in equal ratios.
        largest_loss: the selection clips a row's loss to it; by default 4 log(classes).
        directory: the folder of the file; None takes the report's, with `lipdp fit` the run directory.
        fixed_secret: a secret for tests.
    """

    def __init__(
        self,
        public_data: PrivateDataModule | None = None,
        epsilon: float | None = None,
        temperatures: Sequence[float] | None = None,
        largest_loss: float | None = None,
        directory: str | Path | None = None,
        fixed_secret: bytes | None = None,
    ) -> None:
        problems = []
        if (public_data is None) == (epsilon is None):
            problems.append(
                "TemperatureScaling needs public_data or epsilon, and not both: private rows have to be paid for. "
                "HINT: use TemperatureScaling(epsilon=0.1)."
            )
        if epsilon is not None and not 0 < epsilon < math.inf:
            problems.append(f"epsilon {epsilon} is not a positive finite number. HINT: use 0.1.")
        if largest_loss is not None and not 0 < largest_loss < math.inf:
            problems.append(f"largest_loss {largest_loss} is not a positive finite number. HINT: leave it out.")
        if public_data is not None and public_data.preliminary:
            problems.append("public_data estimates statistics from its rows. HINT: declare its constants instead.")
        if problems:
            raise ValueError(" ".join(problems))
        self.public_data, self.epsilon, self.largest_loss = public_data, epsilon, largest_loss
        self.temperatures = check_grid(GRID if temperatures is None else temperatures)
        self.directory = None if directory is None else Path(directory)
        self._secret = fixed_secret
        self.content: dict[str, Any] | None = None

    # ---- before training

    def set_up_problems(
        self, trainer: lightning.Trainer, module: Any, plan: PrivacyPlan | None, data: Any
    ) -> list[str]:
        """Returns the reasons why a fit is impossible, or would be a release that nobody accounts for."""
        problems = []
        if getattr(module, "task", None) not in ("binary", "classification"):
            problems.append("TemperatureScaling is for classes. HINT: leave it out of a regression.")
        if self.epsilon is None:
            return problems
        if not data.val_dataloader():
            problems.append("TemperatureScaling has no held-out rows to choose on. HINT: set validation_fraction.")
        if plan is not None and plan.unit != "example":
            problems.append(
                "TemperatureScaling's noise covers one row, and the plan protects a group of rows. "
                "HINT: use public_data."
            )
        if _report_of(trainer) is None:
            problems.append(
                "TemperatureScaling(epsilon=...) without a PrivacyReport: nobody would add its epsilon to that of "
                "training. HINT: use `lipdp fit`, or callbacks=[..., PrivacyReport('runs/mine')]."
            )
        return problems

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        directory = self._directory(trainer)
        if trainer.global_step == 0 and directory is not None and (directory / TEMPERATURE_FILE).exists():
            raise ValueError(
                f"{directory} holds the temperature of an earlier run. HINT: use a separate directory for every run."
            )

    def _directory(self, trainer: lightning.Trainer) -> Path | None:
        report = _report_of(trainer)
        return self.directory or (None if report is None else Path(report.directory))

    # ---- after training

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        strategy = _strategy(trainer)
        if trainer.global_step < strategy.branches.limit():
            return  # an unfinished run may be continued, and a temperature is chosen only once

        def settled() -> dict[str, Any]:
            directory = self._directory(trainer)
            known = read_temperature(directory)  # an earlier release is used again, not drawn again
            if known is not None:
                return known
            content = self._fitted(trainer, pl_module)
            if directory is not None:
                write_new(directory, {TEMPERATURE_FILE: (json.dumps(content, indent=1) + "\n").encode()})
            return content

        self.content = strategy.ranks.from_first(settled)
        module: Any = pl_module
        module.output_temperature = float(self.content["temperature"])
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(self._logged(strategy), step=trainer.global_step)

    def _logged(self, strategy: Any) -> dict[str, float]:
        assert self.content is not None
        found = {"calibration/temperature": float(self.content["temperature"])}
        if self.epsilon is not None and strategy.plan.certified:
            found["privacy/epsilon"] = strategy.spending.guarantee().epsilon + self.epsilon
        return found

    def _fitted(self, trainer: lightning.Trainer, module: Any) -> dict[str, Any]:
        plan = _strategy(trainer).plan
        assert plan is not None
        data = trainer.datamodule if self.public_data is None else self.public_data  # type: ignore[attr-defined]
        if self.public_data is not None:
            self.public_data.setup()
        loader = data.val_dataloader() if self.public_data is None else data.test_dataloader()
        averaging = averaging_of(trainer)
        with nullcontext() if averaging is None else averaging.averaged(module):  # the weights that are evaluated
            outputs, labels, _ = predict_rows(module, data, loader)
        scores = class_scores(module, outputs)
        if self.epsilon is None:
            value, release = fit_temperature(scores, labels), None
            rows = f"{len(labels)} held-out rows of {type(data).__name__}, stated to be public"
        else:
            value, release = private_temperature(
                scores, labels, self.epsilon, NoiseSource(self._secret), plan.adjacency, self.temperatures,
                self.largest_loss,
            )  # fmt: skip
            rows = "the private held-out rows of the run, with noise"
        return {
            "temperature": value,
            "chosen_on": rows,
            "release": None if release is None else asdict(release),
            "secret_fixed": self._secret is not None and release is not None,
        }

    # ---- the report

    def report_notes(self) -> list[str]:
        """Returns lines for the report."""
        cost = "no privacy: the rows are stated to be public"
        epsilon = self.epsilon if self.content is None else (self.content["release"] or {}).get("epsilon")
        if epsilon is not None:
            cost = (
                f"epsilon {upper_text(epsilon, 6)}, which is added to that of training; the sum covers training rows "
                "and held-out rows"
            )
        if self.content is None:
            return [f"a temperature is fitted once the plan's steps are taken; it costs {cost}"]
        lines = [
            f"class scores are divided by the temperature {self.content['temperature']:.4g}, fitted after training on "
            f"{self.content['chosen_on']}; it costs {cost}"
        ]
        if self.content["secret_fixed"]:
            lines.append("the secret of the temperature's selection was fixed for a test: its noise can be removed")
        return lines


def temperature_of(trainer: lightning.Trainer) -> TemperatureScaling | None:
    """Returns the trainer's callback that fits a temperature."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((c for c in callbacks if isinstance(c, TemperatureScaling)), None)


def ledger_beside_training(trainer: lightning.Trainer) -> list[dict[str, Any]]:
    """Returns the run's releases besides its ledger of training, also those of an earlier configuration."""
    scaling, report = temperature_of(trainer), _report_of(trainer)
    content = None if scaling is None else scaling.content
    if content is None:
        content = read_temperature(None if report is None else report.directory)
    release = None if content is None else content["release"]
    if release is None:
        return []
    label = "temperature, on held-out rows"
    return [{"mechanism": release["mechanism"], "count": 1, "label": label, "epsilon": release["epsilon"]}]


def released_beside_training(trainer: lightning.Trainer) -> float:
    """Returns the epsilon of the releases so far besides the ledger of training, which adds to that of training."""
    return math.fsum(row["epsilon"] for row in ledger_beside_training(trainer))


def planned_beside_training(trainer: lightning.Trainer) -> float:
    """Returns the epsilon of all releases besides the ledger of training, planned ones included."""
    scaling, released = temperature_of(trainer), released_beside_training(trainer)
    return released or (0.0 if scaling is None else scaling.epsilon or 0.0)


def _report_of(trainer: lightning.Trainer) -> Any:
    from lipdp_lightning.callbacks.privacy_report import PrivacyReport

    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((c for c in callbacks if isinstance(c, PrivacyReport)), None)
