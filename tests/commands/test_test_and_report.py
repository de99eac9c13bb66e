"""`lipdp test` and `lipdp report`: a run directory is read, not changed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_runs import Outcome, lipdp, snapshot


def test_the_metrics_of_a_run_are_found_again(finished: tuple[Path, Outcome]) -> None:
    run_dir, _ = finished
    before = snapshot(run_dir)
    outcome = lipdp("test", "--run_dir", run_dir, "--json")
    assert outcome.code == 0 and outcome.err == ""
    content = json.loads(outcome.out)
    assert content["metrics"] == pytest.approx(json.loads((run_dir / "privacy_report.json").read_text())["metrics"])
    assert content["step"] == 12 and content["status"] == "finished"
    text = lipdp("test", "--run_dir", run_dir).out
    assert re.search(rf"^validation/accuracy +{content['metrics']['validation/accuracy']:.4f}$", text, re.MULTILINE)
    assert snapshot(run_dir) == before


def test_other_held_out_rows_can_be_asked_for(finished: tuple[Path, Outcome]) -> None:
    outcome = lipdp("test", "--run_dir", finished[0], "--json", "--data.init_args.validation_fraction", "0")
    assert outcome.code == 2 and "no held-out rows" in outcome.err and "HINT" in outcome.err


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    outcome = lipdp("test", "--run_dir", tmp_path)
    assert outcome.code == 2 and "is not a run directory" in outcome.err and "HINT" in outcome.err
    outcome = lipdp("report", "--run_dir", tmp_path)
    assert outcome.code == 2 and "privacy_report.json" in outcome.err and "HINT" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_not_trusted_with_code(finished: tuple[Path, Outcome], tmp_path: Path) -> None:
    """`lipdp test` may be pointed at somebody else's directory."""
    import shutil

    import torch

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return (open, (str(tmp_path / "executed"), "w"))

    run_dir = Path(shutil.copytree(finished[0], tmp_path / "run"))
    torch.save({"state_dict": {}, "x": Payload()}, run_dir / "checkpoints" / "last.ckpt")
    outcome = lipdp("test", "--run_dir", run_dir)
    assert outcome.code == 2 and not (tmp_path / "executed").exists()


def test_reports_are_written_again_from_the_facts(finished: tuple[Path, Outcome], tmp_path: Path) -> None:
    run_dir, _ = finished
    outcome = lipdp("report", "--run_dir", run_dir, "--output", tmp_path)
    assert outcome.code == 0 and len(outcome.out.splitlines()) == 3
    original = snapshot(run_dir)
    for name in ("privacy_report.json", "privacy_report.md"):
        assert (tmp_path / name).read_bytes() == original[name]
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_facts_that_contradict_themselves_are_not_reported(finished: tuple[Path, Outcome], tmp_path: Path) -> None:
    content = json.loads((finished[0] / "privacy_report.json").read_text())
    content["epsilon"] = content["epsilon_upper"] / 2
    (tmp_path / "privacy_report.json").write_text(json.dumps(content))
    outcome = lipdp("report", "--run_dir", tmp_path)
    assert outcome.code == 2 and "HINT" in outcome.err
    assert [p.name for p in tmp_path.iterdir()] == ["privacy_report.json"]
