"""lipdp audit: exit codes, files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lipdp_lightning.audit import suite
from lipdp_lightning.audit.optimistic_epsilon import accounting_finding
from lipdp_lightning.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = suite.Effort("quick", restarts=2, attack_steps=2, climbs=0, trials=40, input_trials=20)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    monkeypatch.setitem(suite.EFFORTS, "quick", SMALL)
    monkeypatch.setitem(suite.EFFORTS, "full", SMALL)
    monkeypatch.chdir(tmp_path)


def test_a_sound_configuration_passes_and_writes_page_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = [
        "--config",
        str(CONFIGS / "quickstart.yaml"),
        "--privacy.noise_multiplier",
        "2",
        "--privacy.epsilon",
        "null",
    ]
    assert main(["audit", *config, "--privacy.epochs", "4", "--out", "found", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "found/audit.json").read_text())
    assert printed["violations"] == [] and len(printed["findings"]) == 11
    bounds = [f for f in printed["findings"] if f["epsilon_lower"] is not None]
    assert len(bounds) == 3 and all(f["epsilon_lower"] <= f["epsilon_claimed"] for f in bounds)
    assert "<svg" in (tmp_path / "found/audit.html").read_text()


def test_a_violation_exits_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = suite.Questions.exact

    def one_question(self: suite.Questions) -> dict[str, suite.Question]:
        return {"accounting": lambda share: accounting_finding(self.plan, 0.5 * self.claimed)}

    for claim, code in ((one_question, 1), (lambda self: {"accounting": real(self)["accounting"]}, 0)):
        monkeypatch.setattr(suite.Questions, "exact", claim)
        monkeypatch.setattr(suite.Questions, "statistical", lambda self: {})
        assert main(["audit", "--config", str(CONFIGS / "quickstart.yaml"), "--privacy.accountant", "pld"]) == code
        assert ("1 of 1 checks are violated: accounting" in capsys.readouterr().out) == bool(code)


@pytest.mark.slow
def test_algorithm_8_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--config", str(CONFIGS / "digits_thesis_algorithm8.yaml"), "--privacy.epochs", "2"]) == 1
    out = capsys.readouterr().out
    assert "VIOLATION" in (tmp_path / "audit/digits_thesis_algorithm8/audit.html").read_text()
    assert "neighbours" in out and "checks are violated" in out


@pytest.mark.slow
def test_the_full_suite_trains_shadow_models(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lipdp_lightning.commands import audit

    monkeypatch.setattr(audit, "SHADOW_MODELS", 2)
    config = ["--config", str(CONFIGS / "quickstart.yaml"), "--privacy.epochs", "2", "--privacy.noise_multiplier", "2"]
    assert main(["audit", *config, "--privacy.epsilon", "null", "--suite", "full", "--json"]) == 0
    found = {f["name"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    attacks = found["membership"]["values"]["attacks"]
    assert [a["attack"] for a in attacks] == [
        "loss threshold",
        "logistic regression on logits",
        "likelihood ratio (LiRA)",
    ]
    assert all(0.4 < a["auc"] < 0.7 for a in attacks)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--config"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--config", str(CONFIGS / "quickstart.yaml"), "--suite", "long"], "quick"),
        (["--config", str(CONFIGS / "quickstart.yaml"), "--confidence", "1.5"], "--confidence 1.5"),
        (["--config", str(CONFIGS / "quickstart.yaml"), "--privacy.epsilom", "1"], "epsilom"),
        (["--config", str(CONFIGS / "quickstart.yaml"), "--seed", "-1"], "--seed"),
    ],
)
def test_bad_input_exits_with_2_and_writes_nothing(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
