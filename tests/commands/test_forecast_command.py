"""Forecasts on the command line: certify shows them, fit prints them, submit asks for --anyway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from command_runs import ROOT, fit, lipdp

from lipdp_lightning import cli
from lipdp_lightning.data_modules import Digits

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
HOPELESS = ["--privacy.epsilon", "0.02"]


@pytest.fixture
def no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_train(self: Any) -> Any:
        raise AssertionError("private rows were loaded")

    monkeypatch.setattr(Digits, "load_train", load_train)


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = cli.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.usefixtures("no_rows")
def test_certify_shows_the_signal_of_each_layer_and_loads_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "certify", "--config", QUICKSTART, "--forecast")
    assert code == 0 and "signal / noise  over the run" in out
    assert "forecast: this run is expected to learn" in out and "made-up rows" in out
    code, out, _ = run(capsys, "certify", "--config", QUICKSTART, "--forecast", "--json", *HOPELESS)
    found = json.loads(out)["forecast"]
    assert code == 0 and found["expected_to_learn"] is False and "HINT" in found["verdict"]
    assert found["layers"][0]["over_run"] > found["layers"][0]["per_step"] > 0
    code, out, _ = run(capsys, "certify", "--config", QUICKSTART)
    assert code == 0 and "forecast" not in out and "over the run" not in out


@pytest.mark.usefixtures("no_rows")
def test_certify_takes_public_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = np.random.default_rng(0).random((80, 1, 8, 8)).astype("float32")
    np.savez(tmp_path / "rows.npz", x=rows, y=np.arange(80) % 10)
    inputs = ["--public-inputs", tmp_path / "rows.npz"]
    code, out, _ = run(capsys, "certify", "--config", QUICKSTART, "--forecast", *inputs)
    assert code == 0 and "public rows of" in out
    code, _, err = run(capsys, "certify", "--config", QUICKSTART, *inputs)
    assert code == 2 and "belongs to --forecast" in err
    code, _, err = run(capsys, "certify", "--config", QUICKSTART, "--forecast", "--public-inputs", tmp_path / "no.npz")
    assert code == 2 and "HINT" in err and "Traceback" not in err


@pytest.mark.usefixtures("no_rows")
def test_certify_names_the_reason_of_an_automatic_scaling(capsys: pytest.CaptureFixture[str]) -> None:
    config = ROOT / "configs" / "digits_convnet.yaml"
    code, out, _ = run(capsys, "certify", "--config", config)
    assert code == 0 and "scaling: exact, features.0 sums over 16 positions" in out
    code, _, err = run(capsys, "certify", "--config", ROOT / "configs" / "digits_dpsgd.yaml", "--forecast")
    assert code == 2 and "no forecast" in err


def test_fit_prints_the_forecast_before_it_trains(tmp_path: Path) -> None:
    config = ROOT / "configs" / "digits_convnet.yaml"
    outcome = fit(tmp_path / "run", "--config", config, "--privacy.epochs", "1", "--privacy.epsilon", "0.3")
    assert outcome.code == 0, outcome.err
    assert "why this scaling" in outcome.out and "over the run" in outcome.out
    assert "forecast: this run is not expected to learn" in outcome.out
    report = json.loads((tmp_path / "run" / "privacy_report.json").read_text())
    assert any("was chosen from the certificate: features.0" in note for note in report["notes"])
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["scaling"] == "exact"


@pytest.mark.usefixtures("no_rows")
def test_submit_asks_before_a_run_that_will_not_learn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = ["submit", "--config", QUICKSTART, "--run_dir", tmp_path / "run", "--time", "1:00:00", "--dry-run"]
    code, out, err = run(capsys, *job)
    assert code == 0 and out.startswith("#!") and "expected to learn" in err
    code, out, err = run(capsys, *job, "--", *HOPELESS)
    assert code == 2 and not out and "not expected to learn" in err and "--anyway" in err
    code, out, err = run(capsys, *job, "--anyway", "--", *HOPELESS)
    assert code == 0 and out.startswith("#!") and "not expected to learn" in err
    assert "--anyway" not in out
    unchecked = ["--no-check", "--", *HOPELESS]
    assert run(capsys, *job, *unchecked)[0] == 0


def test_a_forecast_that_fails_ends_no_run(tmp_path: Path) -> None:
    """Clipping by opacus has none, and the run goes on."""
    content = yaml.safe_load((ROOT / "configs" / "digits_dpsgd.yaml").read_text())
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    outcome = fit(tmp_path / "run", "--config", config, "--privacy.epochs", "1", "--privacy.epsilon", "0.3")
    assert outcome.code == 0, outcome.err
    assert "no forecast under scaling 'clip_flat'" in outcome.out


def test_help_names_the_options() -> None:
    assert "--forecast" in lipdp("certify", "--help").out and "--anyway" in lipdp("submit", "--help").out
