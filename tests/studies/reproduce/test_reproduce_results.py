"""The table of docs/results.md: what its columns differ in, and how rows become means."""

from __future__ import annotations

import math

import pytest
import yaml

from lipdp_lightning.studies.reproduce import Options
from lipdp_lightning.studies.reproduce.entries.results import (
    CLIPPED,
    DPSGD,
    ENTRY,
    FILES,
    METHODS,
    UNCLIPPED,
    configuration,
)

CLIPS = ("loss_clip", "cotangent_clip", "radius", "radius_quantile")


@pytest.mark.parametrize("data", FILES)
def test_the_columns_differ_in_the_clip_alone(data: str) -> None:
    unclipped, clipped = (yaml.safe_load(configuration(data, m)[0].read_text()) for m in (UNCLIPPED, CLIPPED))
    assert not any(unclipped["privacy"].get(name) for name in CLIPS)
    # constants only: no example is scaled, no layer is projected
    assert unclipped["privacy"]["scaling"] == "worst_case" and unclipped["privacy"]["max_norm"] is None
    assert clipped["privacy"].pop("loss_clip") > 0
    for content in (unclipped, clipped):
        content["model"].pop("loss")
        content["optimizer"]["init_args"].pop("lr")
    assert unclipped == clipped
    file, changes = configuration(data, DPSGD)
    assert file == configuration(data, CLIPPED)[0]
    radius = yaml.safe_load(file.read_text())["privacy"]["loss_clip"]
    assert changes == {
        "privacy.method": "dpsgd_ghost", "privacy.clip_norm": radius, "privacy.loss_clip": None,
    }  # fmt: skip


def test_three_seeds_of_everything_and_the_first_of_all_before_the_second() -> None:
    cells = ENTRY.cells(Options())
    assert len(cells) == 3 * len(METHODS) * len(FILES)
    assert [cell["seed"] for cell in cells] == sorted(cell["seed"] for cell in cells)  # type: ignore[type-var]
    assert all(cell["steps"] == 2 for cell in ENTRY.cells(Options(quick=True)))


def test_the_page_has_means_and_standard_errors() -> None:
    assert ENTRY.table is not None
    shared = {"certified_epsilon": 3.0, "delta": 1e-5, "adjacency": "add_remove", "seconds": 10.0}
    rows = [
        {"data": "MNIST", "method": UNCLIPPED, "seed": seed, "accuracy": value, **shared}
        for seed, value in enumerate((98.0, 98.6, 98.9))
    ]
    (row,) = ENTRY.table(rows)
    assert row["accuracy"] == 98.5 and row["runs"] == 3
    deviation = math.sqrt((0.5**2 + 0.1**2 + 0.4**2) / 2)
    assert row["standard error"] == pytest.approx(deviation / math.sqrt(3), abs=1e-3)
    assert "98.50 %" in ENTRY.claims[0].ours(rows) and "not run" in ENTRY.claims[1].ours(rows)
