"""A plain loop over private steps ends with the same weights on one process and on two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_distributed_sums import difference, tolerance
from worlds import Worlds


def test_two_processes_end_as_one_and_as_a_trainer(worlds: Worlds) -> None:
    (one,) = worlds.run("loop_weights", 1)
    for run in worlds.run("loop_weights", 2):
        assert run["world"] == 2
        assert difference(run, one) <= tolerance(one, "64-true")
    trained = worlds.run("final_weights", 1, scaling="joint")[0]
    assert difference(one, trained) <= tolerance(one, "64-true")


@pytest.mark.parametrize("mode", ["distributed", "replicated"])
def test_processes_agree_under_noise(worlds: Worlds, mode: str) -> None:
    first, second = worlds.run("loop_weights", 2, noise=1.0, mode=mode)
    assert first["weights"] == second["weights"]
    (quiet,) = worlds.run("loop_weights", 1)
    assert difference(first, quiet) > 100 * tolerance(quiet, "64-true")


def test_an_interrupted_world_continues_bit_for_bit(worlds: Worlds, tmp_path: Path) -> None:
    whole = worlds.run("loop_weights", 2, noise=1.0, folder=str(tmp_path / "whole"))
    worlds.run("loop_weights", 2, noise=1.0, folder=str(tmp_path / "parts"), crash=7)
    again = worlds.attempt("loop_weights", 2, noise=1.0, folder=str(tmp_path / "parts"))
    assert again.codes == [0, 0], again.logs
    assert np.array_equal(again.results[1]["weights"], whole[0]["weights"])
