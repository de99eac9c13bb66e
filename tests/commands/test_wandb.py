"""A run as Weights & Biases sees it, with the real client, offline."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from command_runs import LONG, SMALL, fit, lipdp, snapshot
from wandb_file import read_run

from lipdp_lightning.experiment.loggers import wandb_logger


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_RUN_GROUP", "WANDB_JOB_TYPE", "WANDB_TAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"):  # which hold copies of artifacts
        monkeypatch.setenv(name, str(tmp_path_factory.mktemp("wandb")))
    yield
    wandb.finish()
    wandb.teardown()


def test_offline_unless_there_is_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wandb_logger(tmp_path, "a", "auto")._offline is True
    assert wandb_logger(tmp_path, "a", "online")._offline is False
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert wandb_logger(tmp_path, "a", "auto")._offline is False
    assert wandb_logger(tmp_path, "a", "offline")._offline is True
    assert list(tmp_path.iterdir()) == []


def test_runs_of_an_array_have_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / "a" / "seed-1", tmp_path / "b" / "seed-1", tmp_path / "runs" / "mine"]
    known = [wandb_logger(folder, "x", "offline", ["t" * 99, "\x1b[2J"])._wandb_init for folder in folders]
    assert [each["name"] for each in known] == ["a/seed-1", "b/seed-1", "mine"]
    assert [each["group"] for each in known] == ["a", "b", "runs"] and {each["job_type"] for each in known} == {"fit"}
    assert known[0]["tags"] == ["t" * 64, " [2J"]
    for name, value in {"WANDB_RUN_GROUP": "mine", "WANDB_JOB_TYPE": "eval", "WANDB_TAGS": "x,y"}.items():
        monkeypatch.setenv(name, value)
    chosen = wandb_logger(folders[0], "x", "offline", ["z"])._wandb_init
    assert (chosen["group"], chosen["job_type"], chosen["tags"]) == ("mine", "eval", ["x", "y"])


@pytest.mark.slow
def test_a_run_and_its_continuation(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    outcome = fit(run_dir, *LONG, "--model.log_nonprivate", "true", wandb="auto")
    wandb.teardown()  # the file is written by another process
    assert outcome.code == 0 and outcome.err == "", outcome.err
    run = read_run(run_dir)
    report = json.loads((run_dir / "privacy_report.json").read_text())
    resolved = run["config"]
    assert resolved["privacy"]["steps"] == 120 and resolved["model"]["network"]["class_path"].endswith("MLP")
    assert resolved["privacy_plan"]["noise_multiplier"] == 1.5
    for key in ("epsilon", "delta", "noise_multiplier", "epsilon_taken"):
        assert run["summary"][key] == pytest.approx(report[key])
    assert run["summary"]["steps"] == 12
    assert run["name"] == f"{tmp_path.name}/run" and run["group"] == tmp_path.name and run["job"] == "fit"
    assert run["tags"] == ["MLP", "Digits", "joint", "certified"]
    (attached,) = (artifact for artifact in run["artifacts"] if artifact.type == "privacy-report")
    files = {entry.path: Path(entry.local_path).read_bytes() for entry in attached.manifest.contents}
    names = ("report.html", "privacy_report.json", "privacy_report.md")
    assert files == {name: (run_dir / name).read_bytes() for name in names}
    assert run["summary"]["accuracy"] == pytest.approx(report["metrics"]["validation/accuracy"])
    logged = {key for row in run["history"] for key in row}
    assert "report/epsilon/filenames" in logged and "report/layers/ncols" in logged
    # all that came from training rows is under nonprivate/, and the report names it
    public = ("privacy/", "gradient/", "validation/", "report/", "trainer/", "_", "epoch")
    assert {key for key in logged if not key.startswith(public)} == {"nonprivate/loss"}
    assert any(item.startswith("nonprivate/loss") for item in report["nonprivate_released"])

    assert fit(run_dir, *LONG, "--model.log_nonprivate", "true", "--trainer.max_steps", "14", wandb="auto").code == 0
    wandb.teardown()
    assert read_run(run_dir)["id"] == run["id"] == json.loads((run_dir / "run.json").read_text())["id"]
    assert len(list(run_dir.glob("wandb/offline-run-*"))) == 2
    secret = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=False)["lipdp"]["secret"]
    for name, content in snapshot(run_dir / "wandb").items():
        assert secret not in content and secret.hex().encode() not in content, name
        assert not name.endswith(".ckpt")


def test_checkpoints_are_not_uploaded_and_raw_gradients_not_watched(tmp_path: Path) -> None:
    uploads = json.dumps([{"class_path": "WandbLogger", "init_args": {"log_model": "all", "save_dir": str(tmp_path)}}])
    outcome = lipdp("fit", *SMALL, "--run_dir", tmp_path / "run", "--trainer.logger", uploads)
    assert outcome.code == 2 and "uploads checkpoints" in outcome.err and "HINT: set log_model=False" in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_watching_gradients_is_refused(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import WandbLogger
    from small_runs import fit as train
    from small_runs import make_module, make_plan

    logger = WandbLogger(save_dir=tmp_path, offline=True, log_model=False)
    module = make_module()
    logger.watch(module, log="gradients", log_graph=False)
    with pytest.raises(ValueError, match=r"WandbLogger.watch.*HINT"):
        train(make_plan(steps=1), module=module, trainer_options={"logger": logger})
    logger.experiment.unwatch(module)
    _, trainer = train(make_plan(steps=1), module=module, trainer_options={"logger": logger})
    assert trainer.global_step == 1
    wandb.finish()
    shutil.rmtree(tmp_path / "wandb")
