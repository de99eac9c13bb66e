"""Views, averaged weights and standardised kernels do not depend on how a step is split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_distributed_sums import tolerance
from worlds import Worlds


def apart(run: dict[str, Any], other: dict[str, Any], what: str) -> float:
    return float(np.abs(np.array(run[what]) - np.array(other[what])).max())


@pytest.mark.parametrize(("size", "chunks"), [(1, 3), (2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_without_noise_worlds_agree_on_views_and_averages(worlds: Worlds, size: int, chunks: int) -> None:
    (one,) = worlds.run("kit", 1)
    allowed = 4 * tolerance(one, "64-true")  # four rows for each example
    for run in worlds.run("kit", size, chunks=chunks):
        assert max(apart(run, one, what) for what in ("weights", "average")) <= allowed
        assert run["mean"] < 1e-12


@pytest.mark.parametrize("chunks", [1, 2])
def test_exact_norms_of_views_agree_on_two_ranks(worlds: Worlds, chunks: int) -> None:
    """The norm is that of an example's mean over views, on whichever rank and in whichever micro-batch it is."""
    (one,) = worlds.run("kit", 1, scaling="exact")
    (joint,) = worlds.run("kit", 1)
    assert apart(joint, one, "weights") > 1e-3
    for run in worlds.run("kit", 2, chunks=chunks, scaling="exact"):
        assert max(apart(run, one, what) for what in ("weights", "average")) <= 4 * tolerance(one, "64-true")


def test_exact_norms_of_single_views_on_one_rank_fail_the_same_check(worlds: Worlds) -> None:
    (one,) = worlds.run("kit", 1, scaling="exact")
    run = worlds.run("kit", 2, scaling="exact", single_views=True)[0]
    assert apart(run, one, "weights") > 1e6 * tolerance(one, "64-true")


def test_views_drawn_by_the_row_fail_the_same_check(worlds: Worlds) -> None:
    (one,) = worlds.run("kit", 1, row_keyed=True)
    run = worlds.run("kit", 2, row_keyed=True)[0]
    assert apart(run, one, "weights") > 1e6 * tolerance(one, "64-true")


def test_with_noise_all_ranks_hold_the_same_average(worlds: Worlds) -> None:
    first, *others = worlds.run("kit", 4, noise=1.0)
    assert all(other == first for other in others)
    assert apart({"x": first["weights"]}, {"x": first["average"]}, "x") > 1e-4
