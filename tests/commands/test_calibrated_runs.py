"""`lipdp fit`, `test`, `export` and `status` of a run with calibration and a temperature."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_runs import SMALL, Outcome, fit, lipdp, snapshot

pytestmark = pytest.mark.slow
CALLBACKS = json.dumps(
    [
        {"class_path": "callbacks.CalibrationMetrics"},
        {"class_path": "callbacks.TemperatureScaling", "init_args": {"epsilon": 0.5}},
    ]
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    run_dir = tmp_path_factory.mktemp("calibrated") / "run"
    outcome = fit(run_dir, *SMALL, "--trainer.callbacks", CALLBACKS)
    assert outcome.code == 0, outcome.err
    return run_dir, outcome


def test_the_printed_plan_and_the_result_have_the_sum(
    run: tuple[Path, Outcome], finished: tuple[Path, Outcome]
) -> None:
    """The same plan without a temperature is `finished`."""
    run_dir, outcome = run
    report = json.loads((run_dir / "privacy_report.json").read_text())
    alone = json.loads((finished[0] / "privacy_report.json").read_text())
    assert report["epsilon"] == pytest.approx(alone["epsilon"] + 0.5, rel=1e-9)
    assert report["ledger"][0] == alone["ledger"][0] and len(report["ledger"]) == 2
    (planned,) = [line for line in outcome.out.splitlines() if line.startswith("epsilon (guarantee)")]
    assert 0 <= float(planned.split()[-1]) - report["epsilon"] < 1e-3  # rounded up
    (status,) = json.loads(lipdp("status", run_dir.parent, "--json").out)
    assert status["epsilon"] == report["epsilon"]
    assert (run_dir / "calibration/validation_reliability.png").exists()


def test_tests_and_exports_use_the_temperature(run: tuple[Path, Outcome], tmp_path: Path) -> None:
    run_dir, before = run[0], snapshot(run[0])
    report = json.loads((run_dir / "privacy_report.json").read_text())
    stored = json.loads((run_dir / "temperature.json").read_text())["temperature"]
    outcome = lipdp("test", "--run_dir", run_dir, "--json", "--output", tmp_path / "out")
    content = json.loads(outcome.out)
    assert content["temperature"] == stored and content["metrics"] == pytest.approx(report["metrics"])
    assert {"validation/nll", "validation/nll_without_temperature"} <= set(content["metrics"])
    again = json.loads((tmp_path / "out/calibration/validation.json").read_text())
    assert again["scores"]["diagram"] == report["calibration"][0]["scores"]["diagram"]
    text = lipdp("test", "--run_dir", run_dir).out
    assert f"{stored:.4f}" in text and "held-out records, which the guarantee does not cover" in text
    assert lipdp("export", "--run_dir", run_dir, "--output", tmp_path / "release.pt").code == 0
    assert torch.load(tmp_path / "release.pt", weights_only=True)["temperature"] == stored
    assert lipdp("report", "--run_dir", run_dir, "--output", tmp_path / "pages").code == 0
    assert (tmp_path / "pages/report.html").read_bytes() == before["report.html"] and snapshot(run_dir) == before


def test_a_damaged_temperature_is_not_guessed(run: tuple[Path, Outcome], tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(run[0], tmp_path / "run"))
    (copy / "temperature.json").write_text('{"temperature": -1}')
    outcome = lipdp("test", "--run_dir", copy)
    assert outcome.code == 2 and "temperature.json cannot be read" in outcome.err and "HINT" in outcome.err


def test_bad_set_up_writes_nothing(finished: tuple[Path, Outcome], tmp_path: Path) -> None:
    callbacks = json.dumps([{"class_path": "callbacks.CalibrationMetrics", "init_args": {"outputs": "probabilities"}}])
    outcome = fit(tmp_path / "run", *SMALL, "--trainer.callbacks", callbacks)
    assert outcome.code == 2 and "not to one" in outcome.err and "HINT" in outcome.err
    assert list(tmp_path.iterdir()) == []
    outcome = lipdp("test", "--run_dir", finished[0], "--output", tmp_path / "out")
    assert outcome.code == 2 and "--output is for" in outcome.err
