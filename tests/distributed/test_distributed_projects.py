"""A project that ``privatize`` has made private trains on two processes through its own Trainer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_distributed_sums import difference, tolerance
from worlds import Worlds


@pytest.mark.parametrize("scaling", [pytest.param("joint", marks=pytest.mark.slow), "exact"])
def test_two_processes_of_a_project_end_as_one(worlds: Worlds, scaling: str) -> None:
    (one,) = worlds.run("project_weights", 1, scaling=scaling)
    for run in worlds.run("project_weights", 2, scaling=scaling):
        assert run["world"] == 2 and run["step"] == 12
        assert difference(run, one) <= tolerance(one, "64-true")


@pytest.mark.parametrize("mode", ["distributed", pytest.param("replicated", marks=pytest.mark.slow)])
def test_noise_on_two_processes_is_that_of_the_plan(worlds: Worlds, mode: str) -> None:
    """Each process adds its share: one step moves the weights as far as on one process, and they stay equal."""
    options = {"steps": 1, "hidden": 200}  # 2003 weights: the ratio has a deviation of 2.2 %
    first, second = worlds.run("project_weights", 2, noise=50.0, mode=mode, **options)
    assert first["weights"] == second["weights"]
    (quiet,), (alone,) = (worlds.run("project_weights", 1, noise=noise, **options) for noise in (0.0, 50.0))
    moved = [float(np.std(np.array(run["weights"]) - np.array(quiet["weights"]))) for run in (first, alone)]
    assert moved[1] > 0.05
    assert 0.88 < moved[0] / moved[1] < 1.14, "a share that is missing gives .71, and one too many 1.41"


@pytest.mark.slow
def test_an_interrupted_project_continues_bit_for_bit_on_two_processes(worlds: Worlds, tmp_path: Path) -> None:
    whole = worlds.run("project_weights", 2, noise=1.0, folder=str(tmp_path / "whole"))
    worlds.run("project_weights", 2, noise=1.0, folder=str(tmp_path / "parts"), crash=7)
    again = worlds.attempt("project_weights", 2, noise=1.0, folder=str(tmp_path / "parts"))
    assert again.codes == [0, 0], again.logs
    assert again.results[0]["weights"] == again.results[1]["weights"] == whole[0]["weights"]
    assert (tmp_path / "parts" / "report.html").exists()
    spent = worlds.attempt("project_weights", 2, noise=1.0, folder=str(tmp_path / "parts"))
    assert 0 not in spent.codes and "is finished" in spent.logs[0]


def test_two_processes_continue_from_the_end_of_an_epoch(worlds: Worlds, tmp_path: Path) -> None:
    whole = worlds.run("project_from_epochs_end", 2, folder=str(tmp_path))
    assert [run["step"] for run in whole] == [12, 12] and len(list(tmp_path.iterdir())) == 4
    for step in (3, 9):
        assert worlds.run("project_from_epochs_end", 2, folder=str(tmp_path), step=step) == whole


def test_processes_that_differ_are_refused_on_both(worlds: Worlds) -> None:
    """A row that is missing on one process alone would give two mechanisms one plan."""
    outcome = worlds.attempt("project_weights", 2, missing_on=1)
    assert all(code not in (0, None) for code in outcome.codes)
    assert all("rank" in log and "HINT" in log for log in outcome.logs), outcome.logs
