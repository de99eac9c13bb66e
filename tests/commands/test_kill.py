"""`kill -9` at any moment: the same command continues, and nothing shows that anything happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command_runs import QUICKSTART, ROOT, environment

from lipdp_lightning.accounting.accountants import Spending
from lipdp_lightning.commands.status import describe
from lipdp_lightning.privacy.plan import PrivacyPlan

STEPS = 60
# The real command, except that its first secret is known: a run without interruption can then be compared
COMMAND = """
import sys
import lipdp_lightning.training.private_steps as steps
steps.new_secret = lambda: bytes(range(16))
from lipdp_lightning.cli import main
sys.exit(main(sys.argv[1:]))
"""
CALLBACKS = [
    {"class_path": "callbacks.ResumeCheckpoint", "init_args": {"every_n_steps": 7, "every_n_seconds": 1e9}},
    {"class_path": "small_runs.Slowly", "init_args": {"seconds": 0.03}},
]


def start(run_dir: Path) -> subprocess.Popen[str]:
    options = [
        "--config", QUICKSTART, "--privacy.epochs", "null", "--privacy.steps", str(STEPS),
        "--privacy.accountant", "pld", "--trainer.callbacks", json.dumps(CALLBACKS),
        "--privacy.physical_batch_size", "100",
        "--lr_scheduler", "torch.optim.lr_scheduler.StepLR", "--lr_scheduler.step_size", "2",
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "fit", "--run_dir", str(run_dir), "--wandb", "off", *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        env=environment() | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    return out


def reached(run_dir: Path) -> int:
    """The last step on record."""
    try:
        lines = (run_dir / "steps.txt").read_text().splitlines()
    except FileNotFoundError:
        return -1
    return max((int(line.split()[1]) for line in lines if line.count(" ") == 2), default=-1)


def kill_after(process: subprocess.Popen[str], run_dir: Path, step: int, delay: float) -> None:
    end = time.monotonic() + 300
    while reached(run_dir) < step and time.monotonic() < end and process.poll() is None:
        time.sleep(0.005)
    time.sleep(delay)
    assert process.poll() is None, "the run ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_status_tells_a_killed_run_from_a_running_one(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir)
    while reached(run_dir) < 5 and process.poll() is None:
        time.sleep(0.01)
    running = describe(run_dir)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is dead, and nobody has noticed it yet
    killed = describe(run_dir)
    process.communicate()
    assert (running["state"], killed["state"], describe(run_dir)["state"]) == ("running", "crashed", "crashed")
    plan = PrivacyPlan.from_dict(json.loads((run_dir / "plan.json").read_text()))
    assert Spending(plan).exactly(reached(run_dir) + 1).epsilon <= killed["so far"] <= killed["epsilon"]
    assert 0 < running["so far"] <= running["epsilon"] == Spending(plan).guarantee().epsilon
    finish(start(run_dir))
    assert describe(run_dir)["state"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    whole = start(tmp_path / "whole")
    finish(whole)
    run_dir = tmp_path / "run"
    for step in sorted(chance.sample(range(STEPS - 8), 2)):
        kill_after(start(run_dir), run_dir, step, chance.uniform(0, 0.05))
        record = json.loads((run_dir / "ledger.json").read_text())["branches"]
        assert len(record) == 1 and record[0]["reached"] > reached(run_dir), "the ledger is short of a step"
        assert json.loads((run_dir / "run.json").read_text())["status"] == "running"
    assert "continuing the run" in finish(start(run_dir))

    saved = [torch.load(d / "checkpoints" / "last.ckpt", weights_only=False) for d in (tmp_path / "whole", run_dir)]
    assert saved[0]["global_step"] == saved[1]["global_step"] == STEPS
    for name, value in saved[0]["state_dict"].items():
        assert torch.equal(value, saved[1]["state_dict"][name]), name
    first, second = (s["optimizer_states"][0]["state"] for s in saved)
    assert all(torch.equal(first[i][k], second[i][k]) for i in first for k in first[i])
    report = json.loads((run_dir / "privacy_report.json").read_text())
    assert report["steps_taken"] == STEPS and json.loads((run_dir / "run.json").read_text())["status"] == "finished"
