"""One finished run and one stopped run, shared by the tests of the commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_runs import LONG, SMALL, Outcome, fit


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """Trains a run to its end; its directory and its outcome."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    return run_dir, fit(run_dir, *SMALL)


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Takes 12 of the 120 steps of a run; copy it before changing it."""
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    assert fit(run_dir, *LONG).code == 0
    return run_dir
