"""One finished run and one stopped run, shared by the tests of the commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_runs import LONG, SMALL, Outcome, fit, lipdp_process


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A run that has ended, in a process of its own: directory and outcome."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    process = lipdp_process("fit", "--run_dir", run_dir, "--wandb", "off", *SMALL)
    out, err = process.communicate(timeout=300)
    return run_dir, Outcome(process.returncode, out, err)


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has taken 12 of its 120 steps; copy it before changing it."""
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    assert fit(run_dir, *LONG).code == 0
    return run_dir
