"""Sums over processes that begin while the backward pass still runs: the bits are those of one sum at its end."""

from __future__ import annotations

from typing import Any

import pytest
from worlds import Worlds

REST = ("layerwise", "worst_case", "loss clip")
SLOW = [pytest.param({"mode": mode}, marks=pytest.mark.slow) for mode in ("replicated", "sharded")]
EMPTY = {"expected": 2}  # the share of a process is often empty, and has no gradients


# without noise there is no grid, and a sum of four float64 numbers depends on its order, which follows the buckets
@pytest.mark.parametrize(
    ("size", "noise"),
    [(2, 0.0), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, 1.0), (4, 1e-6), (4, 1.0)))],
)
@pytest.mark.parametrize("options", [{}, {"chunks": 3}, EMPTY], ids=["whole", "micro-batches", "empty shares"])
def test_weights_have_the_bits_of_one_sum_after_the_pass(
    worlds: Worlds, size: int, options: dict[str, Any], noise: float
) -> None:
    apart = worlds.run("overlapped", size, overlap=False, noise=noise, **options)
    assert not apart[0]["begun"]
    for run in worlds.run("overlapped", size, noise=noise, **options):
        assert run["weights"] == apart[0]["weights"] and run["released"] == apart[0]["released"]
        assert run["begun"] and run["taken"]


def test_sums_begin_before_the_pass_is_over_and_are_those_of_all_parameters(worlds: Worlds) -> None:
    whole = worlds.run("overlapped", 2, bucket=1 << 20)[0]
    for run in worlds.run("overlapped", 2):
        parameters, steps = run["taken"] // 12, 12
        buckets = parameters + 1  # and the votes, of which there are none
        assert len(run["begun"]) == buckets * steps
        first = [entries for entries, _ in run["begun"][:buckets]]
        assert sum(first) == len(run["weights"]) and first[-1] == 0
        assert [taken for _, taken in run["begun"][:buckets]] == [*range(1, parameters + 1), parameters]
        assert run["weights"] == whole["weights"]


@pytest.mark.parametrize("scaling", ["radius", *(pytest.param(s, marks=pytest.mark.slow) for s in REST)])
def test_scalings_whose_sums_the_pass_leaves_overlap(worlds: Worlds, scaling: str) -> None:
    apart = worlds.run("overlapped", 2, overlap=False, scaling=scaling)
    for run in worlds.run("overlapped", 2, scaling=scaling):
        assert run["begun"] and run["weights"] == apart[0]["weights"]


@pytest.mark.parametrize("options", [{"repeats": True}, {"scaling": "exact"}, *SLOW])
def test_what_is_known_only_after_the_pass_does_not_overlap(worlds: Worlds, options: dict[str, Any]) -> None:
    assert not any(run["begun"] for run in worlds.run("overlapped", 2, **options))


def test_a_loop_of_torch_overlaps_too(worlds: Worlds) -> None:
    apart = worlds.run("overlapped", 2, overlap=False, loop=True)
    for run in worlds.run("overlapped", 2, loop=True):
        assert run["begun"] and run["weights"] == apart[0]["weights"]
