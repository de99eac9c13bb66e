"""Curves of a finished model on private validation rows: released once, on their own budget, and reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import Logger
from small_runs import SECRET, Blobs, BlobsWithValidation, fit, make_module, make_network, make_plan
from torch import Tensor, nn

from lipdp_lightning.callbacks import PrivacyAccountant, PrivacyReport, PrivateValidationCurves
from lipdp_lightning.layers import MaxMin


class TwoBlobs(Blobs):
    """Two classes; held-out rows of their own."""

    num_classes = 2

    def _rows(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        x, y = super()._rows(count, seed)
        return x, (y > 0).long()

    def load_validation(self) -> tuple[Tensor, Tensor]:
        return self._rows(400, 2)


def two_class_module() -> Any:
    torch.manual_seed(0)
    return make_module(network=nn.Sequential(nn.Linear(6, 8), MaxMin(), nn.Linear(8, 2)))


def release(directory: Path, epsilon: float = 2.0, data: Any = None, module: Any = None, reported: bool = False) -> Any:
    curves = PrivateValidationCurves(epsilon, directory, levels=5, fixed_secret=SECRET)
    data = TwoBlobs() if data is None else data
    module = two_class_module() if module is None else module
    reports = [PrivacyReport(directory)] if reported else []
    fit(make_plan(), PrivacyAccountant(), curves, *reports, data=data, module=module)
    return curves


def test_they_are_released_with_their_own_budget_and_reported(tmp_path: Path) -> None:
    curves = release(tmp_path, reported=True)
    content = json.loads((tmp_path / "private_curves.json").read_text())
    assert content == curves.content
    privacy = content["privacy"]
    assert privacy["epsilon_sum"] == pytest.approx(2.0) and privacy["delta_sum"] == 0
    assert [r["name"] for r in privacy["releases"]] == [
        "roc", "reliability", "hosmer-lemeshow groups", "hosmer-lemeshow sums",
    ]  # fmt: skip
    assert {r["adjacency"] for r in privacy["releases"]} == {"add_remove"}
    for name in ("roc", "reliability", "hosmer_lemeshow"):
        assert (tmp_path / f"private_{name}.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "privacy_report.json").read_text())
    notes = " ".join(report["notes"])
    assert "epsilon 2 in all" in notes and "not part of the training ledger" in notes and "fixed for a test" in notes
    assert all(f"{r['name']}: epsilon {r['epsilon']:.6g}" in notes for r in privacy["releases"])
    assert len(report["ledger"]) == 1 and report["metrics"] == {}  # the training's own line, and nothing exact


def test_with_a_loud_budget_they_are_the_models_true_values(tmp_path: Path) -> None:
    from sklearn.metrics import roc_auc_score

    module = two_class_module()
    content = release(tmp_path, epsilon=1e6, module=module).content
    x, y = TwoBlobs().load_validation()
    with torch.no_grad():
        score = module.eval()(x).softmax(1)[:, 1].numpy()
    assert content["results"]["auc"] == pytest.approx(roc_auc_score(y.numpy(), score), abs=0.02)  # ties on the grid
    low, high = content["results"]["auc_interval"]
    assert low <= content["results"]["auc"] <= high


def test_more_classes_have_no_roc_curve(tmp_path: Path) -> None:
    content = release(tmp_path, data=BlobsWithValidation(), module=make_module(network=make_network())).content
    assert "auc" not in content["results"] and "confidence" in content["about"]
    assert content["privacy"]["epsilon_sum"] == pytest.approx(2.0)


def test_a_second_run_over_the_same_directory_draws_nothing_new(tmp_path: Path) -> None:
    first = release(tmp_path).content
    again = PrivateValidationCurves(2.0, tmp_path, levels=5)  # a new secret: it would give other numbers
    fit(make_plan(), again, data=TwoBlobs(), module=two_class_module())
    assert again.content == first


def test_other_secrets_give_other_curves(tmp_path: Path) -> None:
    """The diagram is compared, since clamped numbers such as the AUC are often equal at this budget.

    Its bins have noise of their own, and all of them are equal with a probability below 1e-9.
    """
    found = []
    for name in ("a", "b"):
        curves = PrivateValidationCurves(0.5, tmp_path / name, levels=5)
        fit(make_plan(), curves, data=TwoBlobs(), module=two_class_module())
        found.append(curves.content["results"])
    assert found[0]["reliability"] != found[1]["reliability"]
    assert "fixed" not in " ".join(curves.report_notes())


def test_an_unfinished_run_releases_nothing(tmp_path: Path) -> None:
    curves = PrivateValidationCurves(1.0, tmp_path)
    options = {"max_steps": 6}
    fit(make_plan(), curves, data=TwoBlobs(), module=two_class_module(), trainer_options=options)
    assert curves.content is None and list(tmp_path.iterdir()) == []
    assert "not released" in curves.report_notes()[0]


def test_exact_metrics_of_the_same_rows_are_refused_or_named(tmp_path: Path) -> None:
    loop = {"limit_val_batches": 1.0}
    with pytest.raises(ValueError, match="limit_val_batches"):
        fit(make_plan(), PrivateValidationCurves(1.0, tmp_path), data=TwoBlobs(), module=two_class_module(),
            trainer_options=loop)  # fmt: skip
    curves = PrivateValidationCurves(1.0, tmp_path, exact_metrics=True)
    fit(make_plan(), curves, data=TwoBlobs(), module=two_class_module(), trainer_options=loop)
    assert "not covered" in curves.report_notes()[-1]


class NoHeldOut(Blobs):
    def load_test(self) -> None:  # type: ignore[override]
        return None


def test_what_cannot_be_released_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="validation rows"):
        fit(make_plan(), PrivateValidationCurves(1.0, tmp_path), data=NoHeldOut())
    wrong: list[dict[str, Any]] = [
        {"epsilon": 0.0}, {"curves": ["pr"]}, {"curves": []}, {"mechanism": "gaussian"}, {"levels": 0}, {"groups": 1},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(ValueError, match="HINT"):
            PrivateValidationCurves(**({"epsilon": 1.0} | options))


class Collector(Logger):
    """What a logger that takes images is given."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, float] = {}
        self.images: dict[str, np.ndarray] = {}

    name, version = "collector", "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.update(metrics)

    def log_image(self, key: str, images: list[np.ndarray]) -> None:
        self.images[key] = images[0]


def test_loggers_get_the_numbers_and_the_pictures(tmp_path: Path) -> None:
    logger = Collector()
    curves = PrivateValidationCurves(2.0, tmp_path, levels=5)
    fit(make_plan(), curves, data=TwoBlobs(), module=two_class_module(), trainer_options={"logger": logger})
    assert logger.metrics["private_validation/epsilon"] == pytest.approx(2.0)
    assert logger.metrics["private_validation/auc"] == curves.content["results"]["auc"]
    assert set(logger.images) == {f"private_validation/{n}" for n in ("roc", "reliability", "hosmer_lemeshow")}
    assert all(image.ndim == 3 and image.shape[2] == 3 for image in logger.images.values())
    assert not any(name.startswith("validation/") for name in logger.metrics)
