"""On two processes, one example moves the one sum of a step by its sensitivity at most, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from neighbouring_runs import pair_plan, row_of_choice, samples
from worlds import Worlds

PATIENT = 200.0  # seconds: a world trains twice
SCALINGS: dict[str, dict[str, Any]] = {
    "joint": {},
    "layerwise": {"scaling": "layerwise", "allocation": "equal"},
    "exact": {"scaling": "exact", "radius": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize(("scaling", "mode"), [*((name, "distributed") for name in SCALINGS), ("joint", "replicated")])
def test_two_ranks_differ_in_what_the_noise_covers_alone(
    worlds: Worlds, tmp_path: Path, scaling: str, mode: str
) -> None:
    options = SCALINGS[scaling]
    plan = pair_plan(**options)
    ranks = worlds.run("neighbours", 2, folder=str(tmp_path), timeout=PATIENT, mode=mode, **options)
    absent = row_of_choice(plan)
    drawn = {f"step {step}" for step, sample in enumerate(samples(plan)) if absent in sample}
    for rank in ranks:
        assert not rank["faults"], "\n".join(rank["faults"])
        assert {name for name, size in rank["moved"].items() if size} == drawn
        assert 0.1 < max(rank["moved"].values()) <= 1
    assert ranks[0]["moved"] == ranks[1]["moved"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken",
    [
        "a loss given to a logger", "division by the drawn sample", "the factor of the largest row",
        "dropout keyed by row", "a bias without noise", "a buffer that follows the data",
    ],
)  # fmt: skip
def test_what_follows_private_data_without_noise_is_found_on_two_ranks(
    worlds: Worlds, tmp_path: Path, broken: str
) -> None:
    ranks = worlds.run("neighbours", 2, folder=str(tmp_path), timeout=PATIENT, broken=broken)
    faults = [fault for rank in ranks for fault in rank["faults"]]
    assert any(ranks[0]["says"] in fault for fault in faults), "\n".join(faults) or "no fault was found"
