"""Calibration in a run: what is logged, written, drawn and reported, and what is refused before the first step."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import Logger
from sklearn.metrics import brier_score_loss, log_loss
from small_runs import Blobs, BlobsWithValidation, fit, make_module, make_network, make_plan, make_trainer
from torch import Tensor, nn
from torchmetrics.classification import MulticlassCalibrationError

from lipdp_lightning.bounds.losses import CrossEntropy
from lipdp_lightning.callbacks import CalibrationMetrics, ParameterAveraging, PrivacyReport
from lipdp_lightning.layers import MaxMin
from lipdp_lightning.report.calibration_summary import calibration_words

VALIDATES = {"limit_val_batches": 1.0}
HELD_OUT = "held-out records, which the guarantee does not cover"


class Collector(Logger):
    """What a logger that takes images and tables is given."""

    name, version = "collector", "0"

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, float] = {}
        self.images: dict[str, np.ndarray] = {}
        self.tables: dict[str, tuple[list[str], list[list[Any]]]] = {}

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.update(metrics)

    def log_image(self, key: str, images: list[np.ndarray]) -> None:
        self.images[key] = images[0]

    def log_table(self, key: str, columns: list[str], data: list[list[Any]]) -> None:
        self.tables[key] = (columns, data)


class Numbers(Blobs):
    """A regression on the blobs, with held-out rows of its own."""

    task = "regression"
    num_classes = None
    target_bound = 2.0

    def _rows(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        x, y = super()._rows(count, seed)
        return x, y.float() - 1 + 0.2 * torch.randn(count, generator=torch.Generator().manual_seed(seed))

    def load_validation(self) -> tuple[Tensor, Tensor]:
        return self._rows(41, 2)


class OneClass(Blobs):
    def load_validation(self) -> tuple[Tensor, Tensor]:
        x, y = self._rows(12, 2)
        return x, torch.zeros_like(y)


class NoHeldOut(Blobs):
    def load_test(self) -> None:  # type: ignore[override]
        return None


def regression_module() -> Any:
    torch.manual_seed(0)
    return make_module(network=nn.Sequential(nn.Linear(6, 8), MaxMin(), nn.Linear(8, 1)), loss="huber")


def test_scores_are_logged_written_drawn_and_reported(tmp_path: Path) -> None:
    logger, callback = Collector(), CalibrationMetrics(bins=10, directory=tmp_path)
    module = make_module(network=make_network(), loss=CrossEntropy(temperature=0.5))
    data = BlobsWithValidation()
    _, trainer = fit(
        make_plan(), callback, PrivacyReport(tmp_path), module=module, data=data,
        trainer_options=VALIDATES | {"logger": logger},
    )  # fmt: skip
    x, y = data.load_validation()
    with torch.no_grad():
        p = (module.eval()(x).double() / 0.5).softmax(1)
    expected = {
        "nll": log_loss(y, p), "brier": brier_score_loss(y, p),
        "ece": MulticlassCalibrationError(3, 10)(p, y).item(),
        "mce": MulticlassCalibrationError(3, 10, norm="max")(p, y).item(),
    }  # fmt: skip
    found = {name: trainer.callback_metrics[f"validation/{name}"].item() for name in expected}
    assert found == pytest.approx(expected, abs=3e-6)
    assert logger.metrics["validation/class_1/brier"] == pytest.approx(brier_score_loss(y == 1, p[:, 1]), abs=1e-6)
    assert {"calibration/validation_reliability", "calibration/validation_classes"} <= set(logger.images)
    columns, rows = logger.tables["calibration/validation"]
    assert len(rows) == 4 and all(row[columns.index("computed on")] == HELD_OUT for row in rows)
    folder = tmp_path / "calibration"
    assert {f.name for f in folder.iterdir()} == {
        "validation.json", "validation.csv", "validation_reliability.png", "validation_classes.png",
    }  # fmt: skip
    content = json.loads((folder / "validation.json").read_text())
    assert content["computed_on"] == HELD_OUT and content["scores"]["rows"] == 12
    with open(folder / "validation.csv") as file:
        written = list(csv.DictReader(file))
    assert float(written[0]["ECE"]) == pytest.approx(expected["ece"], abs=3e-6) and written[1]["class"] == "0"
    report = json.loads((tmp_path / "privacy_report.json").read_text())
    assert report["calibration"] == [content] and report["metric_sources"]["validation/ece"] == "validation"
    assert report["history"][-1]["validation/ece"] == pytest.approx(expected["ece"], abs=3e-6)
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "privacy_report.md").read_text()
    assert page.count('id="calibration-validation-') >= 2 and "Reliability diagram and histogram, ECE" in page
    assert f"Measured exactly on 12 validation rows: {HELD_OUT}." in page.replace("\u00a0", " ") and "Brier" in text


def test_an_evaluation_after_training_is_shown_in_its_place(tmp_path: Path) -> None:
    callback = CalibrationMetrics(directory=tmp_path)
    module, data = make_module(network=make_network()), BlobsWithValidation()
    trainer = make_trainer("auto", callback, limit_val_batches=1.0)
    trainer.test(module, datamodule=data, verbose=False)
    assert set(callback.results) == {"test"} and callback.results["test"]["scores"]["rows"] == 30
    assert (tmp_path / "calibration/test_reliability.png").read_bytes().startswith(b"\x89PNG")
    module.output_temperature = 4.0
    (found,) = trainer.test(module, datamodule=data, verbose=False)
    x, y = data.load_test()
    with torch.no_grad():
        z = module(x).double()
    assert found["test/nll"] == pytest.approx(log_loss(y, (z / 4).softmax(1)), abs=1e-6)
    assert found["test/loss"] == pytest.approx(found["test/nll"], abs=1e-6)
    assert found["test/nll_without_temperature"] == pytest.approx(log_loss(y, z.softmax(1)), abs=1e-6)
    assert callback.results["test"]["temperature"] == 4.0


def test_a_network_that_puts_out_probabilities_is_taken_as_it_is(tmp_path: Path) -> None:
    network = nn.Sequential(make_network(), nn.Softmax(dim=1))
    callback = CalibrationMetrics(outputs="probabilities", directory="")
    module, data = make_module(network=network), BlobsWithValidation()
    make_trainer("auto", callback, limit_val_batches=1.0, default_root_dir=tmp_path).validate(
        module, datamodule=data, verbose=False
    )
    x, y = data.load_validation()
    with torch.no_grad():
        assert callback.results["validation"]["scores"]["nll"] == pytest.approx(log_loss(y, module(x)), abs=1e-5)
    assert list(tmp_path.iterdir()) == []


def test_the_average_is_what_is_measured(tmp_path: Path) -> None:
    averaging, callback = ParameterAveraging(kind="polyak"), CalibrationMetrics(directory=tmp_path)
    module, data = make_module(rate=2.0), BlobsWithValidation()
    _, trainer = fit(make_plan(), averaging, callback, module=module, data=data, trainer_options=VALIDATES)
    x, y = data.load_validation()
    with torch.no_grad(), averaging.averaged(module):
        average = log_loss(y, module.eval()(x).double().softmax(1))
    assert callback.results["validation"]["scores"]["nll"] == pytest.approx(average, abs=1e-6)
    with torch.no_grad():
        assert average != pytest.approx(log_loss(y, module(x).double().softmax(1)), abs=1e-4)
    before = callback.results["validation"]
    with averaging.last_weights():
        trainer.validate(module, datamodule=data, verbose=False)
    assert callback.results["validation"] is before  # the report's diagrams stay those of the average


@pytest.mark.parametrize("kind", ["stated", "halves", "public", "empirical"])
def test_a_regression_has_the_coverage_of_a_stated_residual_model(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "stated": {"residual_scale": 0.5}, "halves": {}, "public": {"public_data": Numbers()},
        "empirical": {"residual_model": "empirical"},
    }[kind]  # fmt: skip
    callback = CalibrationMetrics(levels=[0.5, 0.9], directory=tmp_path, **options)
    module, data = regression_module(), Numbers()
    trainer = make_trainer("auto", callback, limit_val_batches=1.0)
    trainer.validate(module, datamodule=data, verbose=False)

    def residuals(rows: tuple[Tensor, Tensor]) -> np.ndarray:
        with torch.no_grad():
            return (module.eval()(rows[0]).flatten() - rows[1]).double().numpy()

    held_out = residuals(data.load_validation())
    counted, scale = held_out[1::2], np.sqrt(np.mean(held_out[::2] ** 2))
    if kind == "stated":
        counted, scale = held_out, 0.5
    if kind == "public":
        counted, scale = held_out, np.sqrt(np.mean(residuals(Numbers().load_test()) ** 2))
    widths = [0.6744897501960817 * scale, 1.6448536269514722 * scale]
    if kind == "empirical":
        sizes = np.sort(np.abs(held_out[::2]))
        widths = [sizes[math.ceil(22 * level) - 1] for level in (0.5, 0.9)]
    expected = [np.mean(np.abs(counted) <= width) for width in widths]
    scores = callback.results["validation"]["scores"]
    assert scores["rows"] == len(counted) and list(scores["coverage"]) == pytest.approx(expected)
    assert list(scores["half_widths"]) == pytest.approx(widths, rel=1e-5)
    source = {"stated": "stated in", "public": "stated to be public"}.get(kind, "which is not private")
    assert source in " ".join(callback.report_notes())
    words = calibration_words(callback.results["validation"])
    assert source in words and f"{len(counted)} validation rows: {HELD_OUT}." in words
    assert (tmp_path / "calibration/validation_coverage.png").exists()


def test_a_model_that_has_diverged_is_reported_without_scores(tmp_path: Path) -> None:
    module = make_module(network=make_network())
    with torch.no_grad():
        next(module.parameters()).fill_(math.nan)
    callback = CalibrationMetrics(directory=tmp_path)
    trainer = make_trainer("auto", callback, limit_val_batches=1.0)
    (found,) = trainer.validate(module, datamodule=BlobsWithValidation(), verbose=False)
    assert math.isnan(found["validation/ece"]) and callback.results["validation"]["scores"]["undefined"] == 12
    assert json.loads((tmp_path / "calibration/validation.json").read_text())["scores"]["ece"] is None


@pytest.mark.parametrize(
    ("options", "data", "says"),
    [
        ({}, NoHeldOut(), "NoHeldOut has no validation data"),
        ({}, OneClass(), "all 12 rows have class 0"),
        ({"outputs": "probabilities"}, BlobsWithValidation(), "not in .0, 1."),
        ({"residual_scale": 1.0}, BlobsWithValidation(), "is for regression"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_training(options: Any, data: Any, says: str, tmp_path: Path) -> None:
    module = make_module(network=make_network())
    before = [p.clone() for p in module.parameters()]
    with pytest.raises(ValueError, match=says) as caught:
        fit(make_plan(), CalibrationMetrics(**options), data=data, module=module, directory=tmp_path)
    assert "HINT" in str(caught.value) and list(tmp_path.iterdir()) == []
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_an_evaluation_refuses_the_same(tmp_path: Path) -> None:
    callback = CalibrationMetrics(outputs="probabilities", directory=tmp_path)
    network = nn.Sequential(make_network(), nn.Sigmoid())
    trainer = make_trainer("auto", callback, limit_val_batches=1.0)
    with pytest.raises(ValueError, match=r"sum to .* over the classes, not to one.*HINT"):
        trainer.validate(make_module(network=network), datamodule=BlobsWithValidation(), verbose=False)
    wrong: list[dict[str, Any]] = [
        {"bins": 0}, {"outputs": "scores"}, {"levels": [1.0]}, {"residual_scale": -1.0},
        {"residual_scale": 1.0, "residual_model": "empirical"},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(ValueError, match="HINT"):
            CalibrationMetrics(**options)
