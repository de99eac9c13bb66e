"""Sharded noise and optimizer state: each process draws the noise and takes the step of its share of the parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import Worlds

from lipdp_lightning.mechanism.noise import StepNoise, Sum
from lipdp_lightning.mechanism.reductions import owners_of, release_

OPTIMIZERS = {"SGD": 0, "Adam": 2}  # numbers of state per parameter


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_noise_the_weights_are_those_of_whole_optimizers(worlds: Worlds, optimizer: str) -> None:
    whole = worlds.run("final_weights", 2, mode="replicated", optimizer=optimizer)
    shards = worlds.run("final_weights", 2, mode="sharded", optimizer=optimizer)
    for run in shards:
        assert run["weights"] == whole[0]["weights"] and run["step"] == whole[0]["step"]
    held, parameters = [run["held"] for run in shards], len(whole[0]["weights"])
    per_parameter = OPTIMIZERS[optimizer]
    assert parameters * per_parameter <= sum(held) <= whole[0]["held"]
    assert max(held) < whole[0]["held"] or not per_parameter


def test_weights_that_are_not_gathered_are_found(worlds: Worlds) -> None:
    whole = worlds.run("final_weights", 2, mode="replicated")[0]
    apart = worlds.run("final_weights", 2, mode="sharded", mutant="weights are not gathered", steps=1)
    assert apart[0]["weights"] != apart[1]["weights"] and apart[0]["weights"] != whole["weights"]


@pytest.mark.parametrize("scaling", ["radius", "exact", pytest.param("layerwise", marks=pytest.mark.slow)])
def test_every_scaling_agrees(worlds: Worlds, scaling: str) -> None:
    one = worlds.run("final_weights", 2, scaling=scaling, mode="replicated")[0]
    for run in worlds.run("final_weights", 2, scaling=scaling, mode="sharded"):
        apart = max(abs(a - b) for a, b in zip(run["weights"], one["weights"], strict=True))
        assert apart <= (1e-9 if scaling == "radius" else 0.0)


def test_a_run_continues_from_the_states_of_all_ranks(worlds: Worlds, tmp_path: Path) -> None:
    options: dict[str, Any] = {"mode": "sharded", "optimizer": "Adam", "noise": 1.0}
    whole = worlds.run("final_weights", 2, folder=str(tmp_path / "whole"), **options)
    kept = {"folder": str(tmp_path / "parts"), **options}
    assert [r["crashed"] for r in worlds.attempt("final_weights", 2, crash=7, **kept).results] == [True, True]
    continued = worlds.attempt("final_weights", 2, **kept)
    assert continued.codes == [0, 0], continued.logs
    assert [r["weights"] for r in continued.results] == [whole[0]["weights"]] * 2
    assert continued.results[0]["branches"] == 1
    assert [r["held"] for r in continued.results] == [r["held"] for r in whole]


def test_what_an_owner_releases_has_the_bits_of_the_whole_release() -> None:
    """The noise of a sum does not depend on which others are released beside it, nor by whom."""
    torch.manual_seed(0)
    values = [torch.randn(size) for size in (5, 700, 33, 4)]
    noise = StepNoise(bytes(32))

    def sums() -> list[Sum]:
        return [Sum(v.clone(), 1.0 + n, 0.5, 3.0) for n, v in enumerate(values)]

    whole, owners = sums(), (1, 0, 1)
    release_(whole, noise, lambda total: None, replicated=True)
    for rank in (0, 1):
        own = sums()
        release_(own, noise, lambda total, to=None: None, replicated=True, owners=owners, rank=rank)
        for number, one in enumerate(own):
            mine = number >= len(owners) or owners[number] == rank
            assert torch.equal(one.values, whole[number].values if mine else values[number])


def test_owners_are_balanced_and_all_ranks_find_the_same() -> None:
    sizes = [7, 100, 3, 50, 50, 1, 1]
    owners = owners_of(sizes, 3)
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == rank) for rank in range(3)]
    assert sorted(owners_of(sizes, 1)) == [0] * 7 and owners == owners_of(list(sizes), 3)
    assert max(loads) == 100 and min(loads) >= 50
