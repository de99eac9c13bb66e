"""The report a run writes about itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping
from small_runs import BlobsWithValidation, fit, make_module, make_plan

from lipdp_lightning.accounting.accountants import Spending
from lipdp_lightning.callbacks import GradientNoiseMonitor, PrivacyAccountant, PrivacyReport, ResumeCheckpoint
from lipdp_lightning.callbacks.privacy_report import summary_of

VALIDATES = {"limit_val_batches": 1.0}


def written(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "privacy_report.json").read_text())


def test_it_states_the_plan_the_groups_and_held_out_metrics(tmp_path: Path) -> None:
    plan = make_plan()
    report = PrivacyReport(tmp_path, title="A run", config="key: value")
    callbacks = (PrivacyAccountant(), GradientNoiseMonitor(every_n_steps=5), report)
    _, trainer = fit(plan, *callbacks, data=BlobsWithValidation(), trainer_options=VALIDATES)
    content = written(tmp_path)
    assert content["certified"] is True and content["epsilon"] == Spending(plan).guarantee().epsilon
    assert content["steps_taken"] == content["steps_planned"] == 12
    assert [g["name"] for g in content["groups"]] == [g.name for g in trainer.strategy.mechanism.certificate.groups]
    assert set(content["metrics"]) == {"validation/loss", "validation/accuracy"}
    assert set(content["metric_sources"].values()) == {"validation"}
    assert content["nonprivate_released"] == [] and content["secret_fixed"] is True
    steps = [row["step"] for row in content["history"]]
    assert steps == sorted(steps) and 12 in steps
    assert content["ledger"][0]["count"] == 12
    assert {p.name for p in tmp_path.iterdir()} == {"privacy_report.json", "privacy_report.md", "report.html"}


def test_a_run_that_stops_early_keeps_the_guarantee_of_its_plan(tmp_path: Path) -> None:
    plan = make_plan(steps=30)
    stop = EarlyStopping("validation/loss", min_delta=1e9, patience=1)
    keeper = ResumeCheckpoint(tmp_path / "checkpoints")
    _, trainer = fit(plan, PrivacyAccountant(), stop, PrivacyReport(tmp_path), keeper, trainer_options=VALIDATES)
    content, spending = written(tmp_path), Spending(plan)
    assert trainer.global_step == 6 and content["steps_taken"] == 6
    assert content["epsilon"] == spending.guarantee().epsilon
    assert content["epsilon_taken"] == spending.exactly(6).epsilon < content["epsilon"]


def test_an_uncertified_run_reports_no_epsilon(tmp_path: Path) -> None:
    fit(make_plan(scaling="batch_max", steps=2), PrivacyAccountant(), PrivacyReport(tmp_path))
    content = written(tmp_path)
    assert content["certified"] is False and content["epsilon"] is None and content["epsilon_taken"] is None
    assert "epsilon" not in summary_of(PrivacyReportFacts.last)


def test_what_was_logged_without_privacy_is_named(tmp_path: Path) -> None:
    fit(make_plan(steps=2), PrivacyReport(tmp_path), module=make_module(log_nonprivate=True))
    assert any(item.startswith("nonprivate/loss") for item in written(tmp_path)["nonprivate_released"])


class PrivacyReportFacts:
    """The facts of the last report, as the loggers' summary gets them."""

    last: Any = None


@pytest.fixture(autouse=True)
def remember(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PrivacyReport.write

    def write(self: PrivacyReport, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        PrivacyReportFacts.last = self.facts

    monkeypatch.setattr(PrivacyReport, "write", write)


def test_the_summary_has_the_numbers_a_run_is_known_by(tmp_path: Path) -> None:
    plan = make_plan(steps=3)
    fit(plan, PrivacyReport(tmp_path), trainer_options=VALIDATES)
    summary = summary_of(PrivacyReportFacts.last)
    assert summary["epsilon"] == Spending(plan).guarantee().epsilon and summary["delta"] == plan.delta
    assert summary["noise_multiplier"] == 1.0 and summary["steps"] == 3
    assert summary["accuracy"] == summary["validation/accuracy"]


def test_plots_and_the_table_of_layers_go_to_loggers_that_take_them(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import Logger

    class Gallery(Logger):
        name, version = "gallery", "0"

        def __init__(self) -> None:
            super().__init__()
            self.images: dict[str, Any] = {}
            self.tables: dict[str, Any] = {}

        def log_metrics(self, *_: Any, **__: Any) -> None:
            pass

        def log_hyperparams(self, *_: Any, **__: Any) -> None:
            pass

        def log_image(self, key: str, images: list[Any]) -> None:
            self.images[key] = images[0]

        def log_table(self, key: str, columns: list[str], data: list[list[Any]]) -> None:
            self.tables[key] = (columns, data)

    gallery = Gallery()
    fit(make_plan(steps=3), PrivacyReport(tmp_path), trainer_options={"logger": gallery, **VALIDATES})
    assert "report/epsilon" in gallery.images and gallery.images["report/epsilon"].shape[2] == 3
    columns, rows = gallery.tables["report/layers"]
    assert len(rows) == 2 and {"name", "delta", "noise_std"} <= set(columns)
