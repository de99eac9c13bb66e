"""Commands export the weights of runs of `privatize` and `Engine`, and refuse what needs a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_projects import Project, fit, held_out, privatize, rows
from small_runs import SECRET, make_network, make_plan

import lipdp_lightning
from lipdp_lightning.adoption.engine import Engine
from lipdp_lightning.alive import this_process
from lipdp_lightning.cli import main
from lipdp_lightning.commands.compare import read_settings
from lipdp_lightning.training import progress_note


@pytest.fixture
def project(tmp_path: Path) -> Path:
    fit(privatize(run_dir=tmp_path / "project"), held_out=held_out())
    return tmp_path / "project"


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    network = make_network()
    plan = make_plan(scaling="exact", radius=1.0, max_norm=None)
    engine = Engine(network, plan, rows(), loss="cross_entropy", run_dir=tmp_path / "loop", fixed_secret=SECRET)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    engine.keep(optimizer=optimizer)
    with engine:
        for _ in engine:
            optimizer.step()
        engine.report({"test/accuracy": 0.5})
    return tmp_path / "loop"


def test_weights_of_a_project_are_exported_under_its_own_names(project: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    assert main(["export", "--run_dir", str(project), "--output", str(file)]) == 0
    release, saved = lipdp_lightning.load_release(file), project / "checkpoints" / "last.ckpt"
    trained = torch.load(saved, weights_only=False)
    assert Project().load_state_dict(dict(release.state_dict)).missing_keys == []
    assert all(torch.equal(value, trained["state_dict"][name]) for name, value in release.state_dict.items())
    assert trained["lipdp"]["secret"] not in file.read_bytes()
    with pytest.raises(ValueError, match="by a script and not by a configuration"):
        release.module()


@pytest.mark.parametrize("kind", ["project", "loop"])
def test_commands_that_need_a_configuration_say_that_there_is_none(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, file = str(request.getfixturevalue(kind)), str(tmp_path / "model.pt")
    assert main(["export", "--run_dir", run_dir, "--output", file]) == 0
    assert " 0 tensors" not in capsys.readouterr().out
    for words in (
        ["test", "--run_dir", run_dir],
        ["predict", "--run_dir", run_dir, "--output", str(tmp_path / "out.csv")],
        ["predict", "--release", file, "--output", str(tmp_path / "out.csv")],
    ):
        assert main(words) == 2
        assert "by privatize() or Engine" in (told := capsys.readouterr().err) and "HINT" in told


def test_a_loop_has_no_settings_to_compare(loop: Path) -> None:
    assert read_settings(loop) == {}


def status(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["status", str(run_dir), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert main(["status", str(run_dir)]) == 0
    return dict(row, table=capsys.readouterr().out)


def test_a_loop_that_runs_shows_epsilon_rate_and_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_note, "SIGN_OF_LIFE", 0.0)
    plan = make_plan(scaling="exact", radius=1.0, max_norm=None)
    engine = Engine(make_network(), plan, rows(), loss="cross_entropy", run_dir=tmp_path / "loop")
    found = []
    with engine:
        for step in engine:
            found.append((step.epsilon, status(tmp_path / "loop", capsys)))
    assert len(found) == 12
    for number, (epsilon, row) in enumerate(found):
        assert (row["state"], row["step"], row["planned"]) == ("running", number + 1, 12)
        assert row["so far"] >= epsilon > 0 and row["epsilon"] == engine.epsilon
        assert (row["steps/s"] is None) == (number == 0)
        if number:
            assert row["left"] == pytest.approx((11 - number) / row["steps/s"]) and "steps/s" in row["table"]
    ended = status(tmp_path / "loop", capsys)
    assert ended["state"] == "finished" and ended["steps/s"] is None and "steps/s" not in ended["table"]


def test_a_project_that_runs_shows_its_own_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_note, "SIGN_OF_LIFE", 0.0)
    found = []

    class Asks(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            found.append(status(tmp_path / "run", capsys))

    private = privatize(run_dir=tmp_path / "run")
    fit(private, Asks(), held_out=held_out())
    assert all(row["state"] == "running" and 0 < row["so far"] <= private.epsilon for row in found)
    assert found[-1]["metric"] == "validation/val_loss" and found[-1]["value"] > 0 and found[-1]["steps/s"] > 0


@pytest.mark.parametrize("rate", ["5", True, -1.0, 0.0, 1e-320, float("nan"), None, []])
def test_a_rate_that_cannot_be_is_left_out(rate: Any, loop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((loop / "run.json").read_text()) | {"status": "running", "process": this_process()}
    del record["steps"]
    (loop / "run.json").write_text(json.dumps(record))
    (loop / "progress.json").write_text(json.dumps({"rate": rate, "metrics": {}}))
    assert status(loop, capsys)["left"] in (None, 0.0)


def test_status_shows_a_metric_under_the_name_of_the_project(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = project / "privacy_report.json"
    report.write_text(report.read_text().replace("validation/val_loss", "validation/val_acc"))
    assert main(["status", str(project)]) == 0
    assert "validation/val_acc" in capsys.readouterr().out
