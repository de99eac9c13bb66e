"""One of two processes dies in the middle of a step: the other ends with one line, and the run can be continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_runs import QUICKSTART, ROOT, environment

from lipdp_lightning.training.processes import lost_process

SLOWLY = [{"class_path": "small_runs.Slowly", "init_args": {"seconds": 0.2}}]


def start(run_dir: Path) -> subprocess.Popen[str]:
    options = [
        "--config", QUICKSTART, "--privacy.epochs", "null", "--privacy.steps", "400", "--privacy.accountant", "pld",
        "--trainer.callbacks", json.dumps(SLOWLY), "--trainer.devices", "2", "--trainer.accelerator", "cpu",
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "lipdp_lightning.cli", "fit", "--run_dir", str(run_dir), "--wandb", "off", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=environment() | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
    )  # fmt: skip


def second_rank(process: subprocess.Popen[str]) -> int:
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["first", "second"])
def test_the_survivor_says_in_one_line_what_happened(tmp_path: Path, victim: str) -> None:
    process = start(tmp_path / "run")
    steps, end = tmp_path / "run" / "steps.txt", time.monotonic() + 200
    while (
        time.monotonic() < end and process.poll() is None and not (steps.exists() and steps.read_text().count("\n") > 2)
    ):
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()
    other = second_rank(process)
    os.kill(process.pid if victim == "first" else other, signal.SIGKILL)
    _, err = process.communicate(timeout=100)  # until the survivor has closed its end too
    assert process.returncode == (1 if victim == "second" else -signal.SIGKILL)
    lines = [line for line in err.splitlines() if "another process of this run ended" in line]
    assert len(lines) == 1 and "HINT" in lines[0] and str(tmp_path / "run") in lines[0]
    assert "Traceback" not in err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "running"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["first", "second"])
def test_a_death_before_the_processes_have_met_ends_the_other_too(tmp_path: Path, victim: str) -> None:
    """No collective operation can fail yet; the other would wait for half an hour, or be killed without a word."""
    process, end = start(tmp_path / "run"), time.monotonic() + 100
    others: list[str] = []
    while time.monotonic() < end and process.poll() is None and not others:
        time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        others = [child for child in children if b"lipdp" in Path(f"/proc/{child}/cmdline").read_bytes()]
    os.kill(process.pid if victim == "first" else int(others[0]), signal.SIGKILL)
    _, err = process.communicate(timeout=100)
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1 and "another process of this run" in lines[0] and "HINT" in lines[0], err
    assert process.returncode == (1 if victim == "second" else -signal.SIGKILL)


@pytest.mark.parametrize(
    "message",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:3456",
        "Timed out waiting 1800000ms for recv operation to complete",
        "NCCL communicator was aborted on rank 1.\nOriginal reason",
        "[1]: recvValue failed: Connection was likely closed. Did the remote server shutdown?",
    ],
)
def test_errors_of_a_lost_connection_are_known(message: str) -> None:
    found = lost_process(RuntimeError(message))
    assert found is not None and "\n" not in found


def test_another_error_is_no_lost_process() -> None:
    for error in (RuntimeError("shape '[3]' is invalid for input of size 4"), ValueError("gloo"), MemoryError()):
        assert lost_process(error) is None
