"""The list of runs below a folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_runs import Outcome, lipdp, snapshot

from lipdp_lightning import alive
from lipdp_lightning.alive import is_alive, this_process


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    outcome = lipdp("status", folder, "--json")
    assert outcome.code == 0, outcome.err
    return {Path(row["run"]).name: row for row in json.loads(outcome.out)}


@pytest.fixture
def folder(finished: tuple[Path, Outcome], stopped: Path, tmp_path: Path) -> Path:
    runs = tmp_path / "runs"
    shutil.copytree(finished[0], runs / "done")
    shutil.copytree(stopped, runs / "sweep" / "halted")
    return runs


def mark(run_dir: Path, **facts: Any) -> None:
    record = json.loads((run_dir / "run.json").read_text()) | facts
    (run_dir / "run.json").write_text(json.dumps({k: v for k, v in record.items() if v is not None}))


def test_state_step_epsilon_and_accuracy(folder: Path) -> None:
    before = snapshot(folder)
    found = rows(folder)
    assert snapshot(folder) == before
    report = json.loads((folder / "done" / "privacy_report.json").read_text())
    done, halted = found["done"], found["halted"]
    assert (done["state"], done["step"], done["planned"]) == ("finished", 12, 12)
    assert (halted["state"], halted["step"], halted["planned"]) == ("stopped", 12, 120)
    assert done["epsilon"] == report["epsilon"] > 0 and done["delta"] == report["delta"]
    assert done["metric"].endswith("accuracy") and done["value"] == report["metrics"][done["metric"]]
    # a stopped run guarantees what its plan does, which is more than twelve steps spend
    assert halted["epsilon"] > done["epsilon"]


def test_the_table_has_a_line_per_run(folder: Path) -> None:
    out = lipdp("status", folder).out
    assert [line.split()[0] for line in out.splitlines()[2:4]] == [
        str(folder / "done"),
        str(folder / "sweep" / "halted"),
    ]
    assert "finished" in out and "stopped" in out


def test_a_running_run_shows_the_steps_taken_and_not_those_reserved(folder: Path) -> None:
    run_dir = folder / "sweep" / "halted"
    mark(run_dir, status="running", steps=None, process=this_process())
    ledger = json.loads((run_dir / "ledger.json").read_text())
    ledger["branches"][0]["reached"] = 62
    (run_dir / "ledger.json").write_text(json.dumps(ledger))
    with open(run_dir / "steps.txt", "a") as file:
        file.write("diverged 1234567890123456 7\n123")
    row = rows(folder)["halted"]
    assert row["state"] == "running" and row["step"] == 12
    report = json.loads((run_dir / "privacy_report.json").read_text())
    (run_dir / "privacy_report.json").unlink()  # none is written before a run ends
    row = rows(folder)["halted"]
    assert row["epsilon"] == report["epsilon"] and report["epsilon_taken"] <= row["so far"] < report["epsilon"]


@pytest.mark.parametrize(
    ("change", "age", "state"),
    [
        ({}, 0, "running"),
        ({}, 7200, "running, no step for 2.0 h"),
        ({"pid": 1 << 22}, 0, "crashed"),
        ({"start": "1"}, 0, "crashed"),  # the number belongs to another process now
        ({"boot": "another"}, 0, "crashed"),
        ({"host": "another"}, 0, "running or interrupted"),
        ({"host": "another"}, 7200, "no step for 2.0 h"),
        ({"space": "pid:[1]"}, 0, "running or interrupted"),  # a container, in which numbers mean other processes
        ({"pid": -1}, 0, "running or interrupted"),
        ({"pid": "self", "start": None}, 0, "running or interrupted"),
    ],
)
def test_a_crashed_run_is_told_from_a_running_one(folder: Path, change: dict[str, Any], age: int, state: str) -> None:
    run_dir = folder / "sweep" / "halted"
    mark(run_dir, status="running", steps=None, process=this_process() | change)
    then = time.time() - age
    os.utime(run_dir / "progress.json", (then, then))
    assert rows(folder)["halted"]["state"] == state


@pytest.mark.parametrize("process", [None, [], "x", {}, {"pid": True}, {"pid": 1e300}, {"boot": {}, "pid": 3}])
def test_what_identifies_no_process_is_not_running(process: Any) -> None:
    assert is_alive(process) is None


def test_a_process_that_has_ended_is_not_alive_before_its_parent_has_noticed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = alive._start(child.pid)
    known = this_process() | {"pid": child.pid, "start": start}
    assert start and is_alive(known) is True
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_alive(known) is False, "it is a zombie"
    child.communicate()
    assert is_alive(known) is False


def test_a_run_that_predicts_one_class_is_pointed_out(folder: Path) -> None:
    file = folder / "done" / "privacy_report.json"
    report = json.loads(file.read_text())
    name = rows(folder)["done"]["metric"]
    stage = name.partition("/")[0]
    assert "caution" not in lipdp("status", folder / "done").out and rows(folder)["done"]["AUROC"] > 0.5
    report["metrics"] |= {name: 0.1, f"{stage}/majority_rate": 0.11}
    file.write_text(json.dumps(report))
    assert "no better than always predicting the most frequent class, 11" in lipdp("status", folder).out
    assert rows(folder)["done"]["majority"] == 0.11


def test_a_run_that_waits_for_its_job_says_so(folder: Path) -> None:
    mark(folder / "done", status="preempted", steps=7)
    row = rows(folder)["done"]
    assert (row["state"], row["step"]) == ("preempted", 7)


@pytest.mark.parametrize("content", ["", "[]", '{"sta', "\x00\xff"])
def test_files_that_cannot_be_read_hide_no_other_run(folder: Path, content: str) -> None:
    for name in ("run.json", "plan.json", "privacy_report.json", "ledger.json", "progress.json"):
        (folder / "done" / name).write_text(content, encoding="latin-1")
    found = rows(folder)
    assert found["done"]["state"] == "unreadable" and found["done"]["epsilon"] is None
    assert found["halted"]["state"] == "stopped"
    assert lipdp("status", folder).code == 0


def test_no_runs_and_no_folder(tmp_path: Path) -> None:
    outcome = lipdp("status", tmp_path)
    assert outcome.code == 0 and "no runs" in outcome.out
    outcome = lipdp("status", tmp_path / "nowhere")
    assert outcome.code == 2 and "HINT" in outcome.err
