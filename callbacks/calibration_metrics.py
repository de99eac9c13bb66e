"""Measures calibration on held-out rows: scores, reliability diagrams, and coverage of a regression's intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lipdp_lightning.calibration.coverage import LEVELS, CoverageScores, CoverageSums, ResidualModel, check_levels
from lipdp_lightning.calibration.probabilities import check_labels, check_probabilities, logits_of_probabilities
from lipdp_lightning.calibration.scores import scores_of_sums
from lipdp_lightning.calibration.sums import DEFAULT_BINS, CalibrationSums
from lipdp_lightning.callbacks.calibration_output import log_classes, show
from lipdp_lightning.callbacks.parameter_averaging import averaging_of
from lipdp_lightning.data_modules.base import PrivateDataModule
from lipdp_lightning.privacy.plan import PrivacyPlan
from lipdp_lightning.report.calibration_summary import HELD_OUT
from lipdp_lightning.training.predictions import class_scores, held_out_labels, predict_rows

_PROBE_ROWS = 8


class CalibrationMetrics(Callback):
    """Computes calibration on held-out rows: NLL, ECE, MCE, Brier score and diagrams, or coverage for a regression.

    Every evaluation logs the scalars under ``validation/`` or ``test/``. The evaluation after training, and the last
    one in it, also writes the folder ``calibration`` of the run directory (JSON, CSV, PNG), sends images and tables to
    the loggers, and becomes a section of the report. All values are computed exactly: if the held-out rows are private,
    the values are not private, and every output says so. Sums are whole numbers, which are equal for any number
    of processes (`lipdp_lightning.calibration`).

    Args:
        bins: the number of bins of equal width on [0, 1].
        outputs: the kind of the network's outputs: 'logits', to which the loss's temperature and that of a
            `TemperatureScaling` are applied, or 'probabilities', which are checked.
        levels: the levels of a regression's central intervals.
        residual_model: the model of a regression's residuals, 'gaussian' or 'empirical'.
        residual_scale: a standard deviation known without the data. Without it the residual model is estimated at each
            evaluation: from ``public_data``, or else from every other held-out row; coverage is measured on the rest.
        public_data: a data module whose held-out rows (`test_dataloader`) are public.
        directory: the folder of the files; None takes the trainer's `default_root_dir`, with `lipdp fit` the run
            directory. An empty text writes no files.
    """

    def __init__(
        self,
        bins: int = DEFAULT_BINS,
        outputs: Literal["logits", "probabilities"] = "logits",
        levels: Sequence[float] = LEVELS,
        residual_model: Literal["gaussian", "empirical"] = "gaussian",
        residual_scale: float | None = None,
        public_data: PrivateDataModule | None = None,
        directory: str | Path | None = None,
    ) -> None:
        CalibrationSums(2, bins, outputs)  # it raises if an argument is not valid
        self.bins, self.outputs, self.levels = bins, outputs, check_levels(levels)
        self.residual_model, self.public_data, self.directory = residual_model, public_data, directory
        self._stated: ResidualModel | None = None
        if residual_scale is not None:
            if public_data is not None or residual_model != "gaussian":
                raise ValueError(
                    "residual_scale states a Gaussian residual model, and needs neither public_data nor another model. "
                    "HINT: leave residual_scale out, and the model is estimated."
                )
            self._stated = ResidualModel("gaussian", float(residual_scale), source="stated in the configuration")
        if public_data is not None and public_data.preliminary:
            raise ValueError("public_data estimates statistics from its rows. HINT: declare its constants instead.")
        self.results: dict[str, dict[str, Any]] = {}
        self._sums: dict[str, Any] = {}
        self._halved = False
        self._checked: set[int] = set()

    # ---- set-up

    def set_up_problems(
        self, trainer: lightning.Trainer, module: Any, plan: PrivacyPlan | None, data: Any
    ) -> list[str]:
        """Returns the reasons why nothing could be measured, before the first step."""
        loader = data.val_dataloader()
        if not loader:
            hint = "HINT: set data.init_args.validation_fraction, or leave CalibrationMetrics out."
            return [f"CalibrationMetrics: {type(data).__name__} has no validation data. {hint}"]
        return self._problems(module, data, loader)

    def setup(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if data is None:
            raise ValueError(
                "CalibrationMetrics needs a data module. HINT: call trainer.test(module, datamodule=data)."
            )
        if stage not in ("validate", "test"):
            return  # in training, the Strategy collects all problems
        loader = data.val_dataloader() if stage == "validate" else data.test_dataloader()
        if loader and id(loader.dataset) not in self._checked:
            problems = self._problems(pl_module, data, loader)
            if problems:
                raise ValueError(" ".join(problems))

    def _problems(self, module: Any, data: Any, loader: Any) -> list[str]:
        try:
            if module.task == "regression":
                rows = len(held_out_labels(loader))
                needed = 1 if self._stated is not None or self.public_data is not None else 4
                if rows < needed:
                    return [f"CalibrationMetrics: {rows} held-out rows are too few. HINT: hold out {needed} or more."]
            else:
                if self._stated is not None or self.public_data is not None:
                    return ["CalibrationMetrics: a residual model is for regression. HINT: leave it out for classes."]
                check_labels(held_out_labels(loader), _classes(module, data))
                if not data.preliminary:  # otherwise its rows are not ready
                    self._probe(module, data, loader)
        except ValueError as error:
            return [f"CalibrationMetrics: {error}"]
        self._checked.add(id(loader.dataset))
        return []

    def _probe(self, module: Any, data: Any, loader: Any) -> None:
        """Checks the outputs for a few held-out rows, as an evaluation does."""
        try:
            outputs, _, _ = predict_rows(module, data, loader, _PROBE_ROWS)
        except (RuntimeError, TypeError, IndexError):
            return  # the certifier says why the network does not take these rows
        if self.outputs == "probabilities":
            check_probabilities(outputs)
        width = outputs.shape[1] if outputs.dim() > 1 else 1
        if module.task == "classification" and width != _classes(module, data):
            raise ValueError(
                f"the network has {width} outputs for {_classes(module, data)} classes. HINT: use one for each."
            )

    # ---- an evaluation

    def _begin(self, trainer: lightning.Trainer, module: Any, stage: str) -> None:
        if trainer.sanity_checking:
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        if module.task == "regression":
            self._halved = self._stated is None and self.public_data is None
            sums: Any = CoverageSums(self.levels)
            sums.model = self._residuals(module, data, stage)
        else:
            sums = {"scaled": CalibrationSums(_classes(module, data), self.bins)}
            if module.output_temperature != 1.0:
                sums["unscaled"] = CalibrationSums(_classes(module, data), self.bins)
            sums = torch.nn.ModuleDict(sums)
        self._sums[stage] = sums.to(module.device)

    def _residuals(self, module: Any, data: Any, stage: str) -> ResidualModel | None:
        """Returns the residual model of this evaluation, or None if outputs are not finite."""
        if self._stated is not None:
            return self._stated
        if self.public_data is not None:
            self.public_data.setup()
            rows, loader = self.public_data, self.public_data.test_dataloader()
            source = f"estimated from held-out rows of {type(rows).__name__}, which are stated to be public"
        else:
            rows, loader = data, data.val_dataloader() if stage == "validation" else data.test_dataloader()
            source = "estimated from every other held-out row, which is not private; coverage is that of the rest"
        outputs, targets, ids = predict_rows(module, rows, loader)
        residuals = outputs.double().reshape(len(ids), -1) - targets.double().reshape(len(ids), -1)
        if self._halved:
            residuals = residuals[ids % 2 == 0]
        if not bool(residuals.isfinite().all()):
            return None
        return ResidualModel.of_residuals(residuals, self.residual_model, source)

    def _add(self, trainer: lightning.Trainer, module: Any, outputs: Any, batch: Any, stage: str) -> None:
        if trainer.sanity_checking:
            return
        x, y, ids = batch
        raw = outputs["outputs"] if isinstance(outputs, dict) and "outputs" in outputs else module(x)
        # every process receives all held-out rows, and counts its share of them
        order = ids // 2 if self._halved else ids
        mine = order % trainer.world_size == trainer.global_rank
        if self._halved:
            mine = mine & (ids % 2 == 1)
        mine = mine.to(raw.device)
        raw, y = raw[mine], y[mine]
        sums = self._sums[stage]
        if module.task == "regression":
            if sums.model is not None:
                sums.update(raw, y)
            return
        scores = self._class_scores(module, raw)
        sums["scaled"].update(scores / module.output_temperature, y)
        if "unscaled" in sums:
            sums["unscaled"].update(scores, y)

    def _class_scores(self, module: Any, outputs: Tensor) -> Tensor:
        if self.outputs == "logits":
            return class_scores(module, outputs)
        flat = outputs.reshape(-1) if module.task == "binary" else outputs
        return logits_of_probabilities(flat)

    def _end(self, trainer: lightning.Trainer, module: Any, stage: str) -> None:
        if trainer.sanity_checking:
            return
        sums = self._sums.pop(stage)
        result: dict[str, Any] = {
            "stage": stage, "task": module.task, "step": trainer.global_step, "computed_on": HELD_OUT,
        }  # fmt: skip
        if module.task == "regression":
            if sums.model is None:
                scalars = {"coverage_error": math.nan}
            else:
                coverage = CoverageScores.of_sums(sums.compute(), self.levels, sums.model)
                scalars, result["scores"] = coverage.scalars(), coverage.to_dict()
        else:
            scores = scores_of_sums(sums["scaled"].compute())
            scalars, result["scores"] = scores.scalars(), scores.to_dict()
            result["temperature"] = module.output_temperature
            if "unscaled" in sums:
                without = scores_of_sums(sums["unscaled"].compute())
                result["without_temperature"] = without.scalars()
                scalars |= {f"{k}_without_temperature": without.scalars()[k] for k in ("nll", "ece")}
        for name, value in scalars.items():
            logged = torch.tensor(value, dtype=torch.float64, device=module.device)
            module.log(f"{stage}/{name}", logged, on_epoch=True, on_step=False, batch_size=1, sync_dist=True)
        averaging = averaging_of(trainer)
        if "scores" in result and not (averaging is not None and averaging.suspended):
            self.results[stage] = result
            if trainer.is_global_zero:
                log_classes(trainer.loggers, result)

    # ---- what is shown

    def _publish(self, trainer: lightning.Trainer, stage: str) -> None:
        result = self.results.get(stage)
        if result is None or not trainer.is_global_zero:
            return
        directory = Path(trainer.default_root_dir if self.directory is None else self.directory)
        show(trainer.loggers, None if self.directory == "" else directory, result)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._publish(trainer, "validation")

    def _final(self, trainer: lightning.Trainer, stage: str) -> None:
        averaging = averaging_of(trainer)
        if trainer.state.fn != "fit" and not (averaging is not None and averaging.suspended):
            self._publish(trainer, stage)

    def on_validation_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._begin(trainer, pl_module, "validation")

    def on_test_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._begin(trainer, pl_module, "test")

    def on_validation_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any,
        batch_idx: int, dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        self._add(trainer, pl_module, outputs, batch, "validation")

    def on_test_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any,
        batch_idx: int, dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        self._add(trainer, pl_module, outputs, batch, "test")

    def on_validation_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._end(trainer, pl_module, "validation")

    def on_test_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._end(trainer, pl_module, "test")

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._final(trainer, "validation")

    def on_test_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._final(trainer, "test")

    def report_notes(self) -> list[str]:
        """Returns lines for the report."""
        lines = [
            f"calibration on {stage} rows ({result['scores']['rows']} of them) is exact and computed on {HELD_OUT}"
            for stage, result in self.results.items()
        ]
        model = next((r["scores"]["residual_model"] for r in self.results.values() if r["task"] == "regression"), None)
        return lines if model is None else [*lines, f"residual model of the intervals: {model}"]


def _classes(module: Any, data: Any) -> int:
    return 2 if module.task == "binary" else int(data.num_classes)


def calibration_results(trainer: lightning.Trainer) -> list[dict[str, Any]]:
    """Returns the results of the trainer's callback, for the report."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [result for c in callbacks if isinstance(c, CalibrationMetrics) for result in c.results.values()]
