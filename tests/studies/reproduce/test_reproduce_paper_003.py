"""The entries of paper 003: what their columns differ in, what they say of their rows, and one cell of the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lipdp_lightning.calibration.scores import scores_of_sums
from lipdp_lightning.calibration.sums import binned_sums
from lipdp_lightning.studies.reproduce import Options
from lipdp_lightning.studies.reproduce.calibrated import diagram_of, diagram_text, moments_of
from lipdp_lightning.studies.reproduce.entries import (
    paper_003_membership,
    paper_003_regression,
    paper_003_table_2,
    paper_003_text,
    paper_003_transformer,
)
from lipdp_lightning.studies.reproduce.entries.paper_003_table_1 import COLUMNS
from lipdp_lightning.studies.reproduce.entries.paper_003_table_1 import ENTRY as KERNELS
from lipdp_lightning.studies.reproduce.entries.paper_003_table_2 import LOCAL, OURS, STEPS, configuration, verdict

SHARED = {"certified_epsilon": 2.3, "delta": 1e-5, "adjacency": "add_remove"}


@pytest.mark.parametrize("network", paper_003_table_2.NETWORKS)
@pytest.mark.parametrize("data", paper_003_table_2.DATA)
def test_methods_of_a_table_differ_in_what_bounds_an_example(data: str, network: str) -> None:
    """Network, data, batch, steps, delta and accountant are those of every method, and epsilon that of the private."""
    seen = []
    for method in paper_003_table_2.METHODS:
        content = configuration(data, network, method, STEPS, 0)
        privacy: dict[str, Any] = content["privacy"]
        assert privacy["epsilon"] == paper_003_table_2.DATA[data]  # ignored without privacy
        for name in ("method", "clipping", "clip_norm", "scaling", "allocation", "max_norm", "switch_at", "switch_to"):
            privacy.pop(name, None)
        content["model"]["loss"].pop("init_args")
        content["optimizer"]["init_args"].pop("lr")
        seen.append(content)
    assert all(content == seen[0] for content in seen)


@pytest.mark.parametrize(
    ("entry", "count"),
    [
        (paper_003_table_2.ENTRY, 3 * 2 * 5), (paper_003_regression.ENTRY, 2 * 5), (paper_003_text.ENTRY, 2 * 4),
        (paper_003_membership.ENTRY, 4), (KERNELS, 15), (paper_003_transformer.ENTRY, 4),
    ],
)  # fmt: skip
def test_every_cell_has_its_settings(entry: Any, count: int) -> None:
    cells = entry.cells(Options(seeds=1))
    assert len(cells) == count
    module = {
        "paper-003-figures-11-12": (paper_003_regression, ("data", "method")),
        "paper-003-text": (paper_003_text, ("encoder", "method")),
    }.get(entry.name)
    for cell in cells if module else ():
        home, names = module  # type: ignore[misc]
        assert tuple(cell[name] for name in names) in home.SETTINGS


def rows_of(ours: tuple[float, float], local: tuple[float, float]) -> list[dict[str, Any]]:
    return [
        {"data": "MNIST", "network": "linear", "method": method, "accuracy": a, "ece": e, **SHARED}
        for method, (a, e) in ((OURS, ours), (LOCAL, local))
    ]


def test_the_claim_is_reported_whichever_way_it_falls() -> None:
    better = verdict(rows_of((0.96, 0.01), (0.965, 0.02)), "MNIST", "linear")
    assert better.endswith("ECE 1.00 % against 2.00 %: lower.") and "-0.50 points" in better
    worse = verdict(rows_of((0.96, 0.03), (0.965, 0.02)), "MNIST", "linear")
    assert worse.endswith(": not lower.") and "not within a point" not in worse
    assert "not within a point" in verdict(rows_of((0.94, 0.01), (0.965, 0.02)), "MNIST", "linear")


def test_a_diagram_survives_its_column_of_text() -> None:
    generator = torch.Generator().manual_seed(0)
    log_p = torch.randn(400, 4, generator=generator, dtype=torch.float64).mul(2).log_softmax(1)
    scores = scores_of_sums(binned_sums(log_p, torch.randint(4, (400,), generator=generator)))
    bins = diagram_of(diagram_text(scores.diagram))
    again = sum(n * abs(predicted - observed) for n, predicted, observed in bins) / 400
    assert again == pytest.approx(scores.ece, abs=1e-5) and sum(n for n, *_ in bins) == 400
    assert moments_of(100) == list(range(10, 101, 10)) and moments_of(2) == [1, 2]


def test_a_row_of_the_kernel_table_states_its_properties() -> None:
    found = {}
    for method in ("no clipping", "global clipping, small R, flat"):
        cell = {"method": method, "kernel": "", "seed": 1, "steps": 3}
        found[method] = {**cell, **KERNELS.run(cell)}
    plain, dropped = ([holds(row) for holds in COLUMNS.values()] for row in found.values())
    assert plain[:4] == [True] * 4 and dropped[:3] == [False, False, True]
    assert KERNELS.table is not None
    row = KERNELS.table([found["no clipping"]])[0]
    assert row["symmetric"] == "1 of 1" and row["certified_epsilon"] is None
