"""Without noise, 1, 2 and 4 processes, micro-batches and interruptions lead to the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import Worlds

ROWS, BATCH, STEPS, RATE = 60, 20, 12, 0.1
UNIT = {"32-true": 2.0**-24, "64-true": 2.0**-53}


def tolerance(run: dict[str, Any], precision: str, batch: int = BATCH, steps: int = STEPS) -> float:
    """How far apart two orders of summation may end.

    n terms of size at most Delta, summed in any two orders, differ by at most 2 (n - 1) u n Delta; the step moves the
    weights by rate / batch times that. n is taken to be all rows, three times what a step draws, which
    also covers how the difference grows from step to step.
    """
    return 2 * ROWS**2 * UNIT[precision] * run["largest"] * RATE / batch * steps


def difference(run: dict[str, Any], reference: dict[str, Any]) -> float:
    return float(np.abs(np.array(run["weights"]) - np.array(reference["weights"])).max())


def reference(worlds: Worlds, **options: Any) -> dict[str, Any]:
    return worlds.run("final_weights", 1, **options)[0]


@pytest.mark.parametrize("precision", ["64-true", "32-true"])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_worlds_and_micro_batches_agree(worlds: Worlds, size: int, chunks: int, precision: str) -> None:
    one = reference(worlds, precision=precision)
    for run in worlds.run("final_weights", size, precision=precision, chunks=chunks):
        assert difference(run, one) <= tolerance(one, precision)
        assert run["step"] == STEPS and run["branches"] == 1


@pytest.mark.parametrize("scaling", ["layerwise", "worst_case", "radius", "exact", "loss clip"])
def test_scalings_agree(worlds: Worlds, scaling: str) -> None:
    one = reference(worlds, scaling=scaling)
    # the radius query has noise of 1e-9 votes in each world
    allowed = 1e-9 if scaling == "radius" else tolerance(one, "64-true")
    runs = [
        *worlds.run("final_weights", 2, scaling=scaling, chunks=3),
        *worlds.run("final_weights", 4, scaling=scaling),
    ]
    assert max(difference(run, one) for run in runs) <= allowed


def test_dropout_masks_follow_the_examples(worlds: Worlds) -> None:
    one = reference(worlds, dropout=True)
    assert difference(one, reference(worlds)) > 1e-3, "no mask was drawn"
    for run in worlds.run("final_weights", 4, dropout=True, chunks=3):
        assert difference(run, one) <= tolerance(one, "64-true")


def test_replicated_mode_and_two_nodes_agree(worlds: Worlds) -> None:
    one = reference(worlds)
    runs = [*worlds.run("final_weights", 2, mode="replicated"), *worlds.run("final_weights", 2, nodes=2)]
    assert max(difference(run, one) for run in runs) <= tolerance(one, "64-true")


@pytest.mark.parametrize(
    ("mutant", "options"),
    [
        ("mean over ranks not undone", {}),
        ("mean over micro-batches not undone", {"chunks": 3}),
        ("empty local batch dropped", {"expected": 2}),
        ("every rank samples alike", {}),
    ],
)
def test_broken_sums_are_found(worlds: Worlds, mutant: str, options: dict[str, Any]) -> None:
    batch = options.get("expected", BATCH)
    one = reference(worlds, **{k: v for k, v in options.items() if k == "expected"})
    sound = worlds.run("final_weights", 2, **options)[0]
    broken = worlds.run("final_weights", 2, mutant=mutant, **options)[0]
    assert difference(sound, one) <= tolerance(one, "64-true", batch) < 1e-6 * difference(broken, one)


# ---- the sample


def sample_complaints(ranks: list[dict[str, Any]], chunks: int) -> list[str]:
    """What is wrong with the rows that the ranks have seen."""
    found = []
    seen: dict[int, list[int]] = {}
    for number, rank in enumerate(ranks):
        steps = [step for step, _ in rank["rows"]]
        if steps != [step for step in range(STEPS) for _ in range(chunks)]:
            found.append(f"rank {number} took steps {steps}")
        for step, rows in rank["rows"]:
            seen.setdefault(step, []).extend(rows)
    for step, exact in enumerate(ranks[0]["exact"]):
        rows = seen.get(step, [])
        if len(rows) != len(set(rows)):
            found.append(f"step {step}: a row was used twice")
        if sorted(set(rows)) != exact:
            found.append(f"step {step}: {sorted(set(rows))} instead of {exact}")
    return found


@pytest.mark.parametrize(
    ("size", "expected", "chunks"),
    [
        (1, 1.0, 3),
        (2, 1.0, 3),
        (4, 20.0, 3),
        *(pytest.param(*setting, marks=pytest.mark.slow) for setting in ((2, 20.0, 1), (4, 1.0, 3))),
    ],
)
def test_ranks_share_one_exact_poisson_sample(worlds: Worlds, size: int, expected: float, chunks: int) -> None:
    ranks = worlds.run("sample", size, expected=expected, chunks=chunks)
    assert not sample_complaints(ranks, chunks)
    assert all(rank["step"] == STEPS and rank["fixed"] for rank in ranks)
    if expected == 1.0:
        empty = [sum(not rows for _, rows in rank["rows"]) for rank in ranks]
        assert min(empty) > STEPS, "hardly any local batch was empty"
        assert any(not exact for exact in ranks[0]["exact"]), "no global sample was empty"


@pytest.mark.parametrize("mutant", ["empty local batch dropped", "every rank samples alike"])
def test_broken_samplers_are_found(worlds: Worlds, mutant: str) -> None:
    assert sample_complaints(worlds.run("sample", 2, expected=1.0, chunks=1, mutant=mutant), 1)


# ---- interruptions


@pytest.mark.parametrize(("size", "chunks"), [(1, 3), (2, 1), pytest.param(4, 3, marks=pytest.mark.slow)])
def test_an_interrupted_run_agrees(worlds: Worlds, tmp_path: Path, size: int, chunks: int) -> None:
    one = reference(worlds, folder=str(tmp_path / "whole"))
    run = {"folder": str(tmp_path / "run"), "chunks": chunks}
    crashed = worlds.run("final_weights", size, crash=7, **run)
    for before, after in zip(crashed, worlds.run("final_weights", size, **run), strict=True):
        assert difference(after, one) <= tolerance(one, "64-true")
        assert before["released"]["6"] == after["released"]["6"], "the repeated step was another release"
        assert (after["step"], after["spent"], after["branches"]) == (STEPS, STEPS, 1)


# All rows in every step, so that another secret draws the same sample; more steps than are reserved at once
EVERY_ROW = {"expected": ROWS, "planned": 70}


@pytest.mark.parametrize("size", [1, 4])
def test_another_world_size_is_a_new_branch_and_agrees(worlds: Worlds, tmp_path: Path, size: int) -> None:
    """From two processes, after a crash in step 7: the checkpoint is of step 6, 50 steps were reserved."""
    run = {"folder": str(tmp_path / "run"), **EVERY_ROW}
    crashed = worlds.run("final_weights", 2, crash=7, **run)
    continued = worlds.run("final_weights", size, **run)
    end = 6 + EVERY_ROW["planned"] - 50
    one = reference(worlds, folder=str(tmp_path / "whole"), steps=end, **EVERY_ROW)
    for after in continued:
        assert (after["branches"], after["spent"], after["limit"], after["step"]) == (2, 70, end, end)
        assert difference(after, one) <= tolerance(one, "64-true", ROWS, end)
    assert len({run["secret"] for run in continued}) == 1
    assert crashed[0]["crashed"]


@pytest.mark.slow
def test_another_world_size_after_a_clean_stop_costs_nothing(worlds: Worlds, tmp_path: Path) -> None:
    run = {"folder": str(tmp_path / "run"), "expected": ROWS}
    stopped = worlds.run("final_weights", 2, steps=6, **run)[0]
    after = worlds.run("final_weights", 4, **run)[0]
    one = reference(worlds, folder=str(tmp_path / "whole"), expected=ROWS)
    assert (after["branches"], after["spent"], after["step"]) == (2, STEPS, STEPS)
    assert difference(after, one) <= tolerance(one, "64-true", ROWS)
    assert after["secret"] != stopped["secret"]


def test_another_world_size_draws_fresh_noise(worlds: Worlds, tmp_path: Path) -> None:
    run = {"folder": str(tmp_path / "run"), "noise": 1.0, **EVERY_ROW}
    crashed = worlds.run("final_weights", 2, crash=7, **run)[0]
    after = worlds.run("final_weights", 4, **run)[0]
    assert after["released"]["6"] != crashed["released"]["6"]
    assert after["spent"] == 70 and after["branches"] == 2
