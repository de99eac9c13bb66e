"""Trained networks and group normalisation: every arm can be made, and differs from the others in what it should."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lipdp_lightning.audit import attack
from lipdp_lightning.bounds import certify
from lipdp_lightning.studies.normalised_mlp import NormalisedMLP
from lipdp_lightning.studies.reproduce import Options, Output
from lipdp_lightning.studies.reproduce.entries import paper_000_networks, paper_000_table_5, paper_003_figures
from lipdp_lightning.studies.reproduce.tabular import SETS


def test_a_normalised_network_is_certified_and_its_certificate_holds() -> None:
    torch.manual_seed(0)
    network = NormalisedMLP([6], 3, hidden=8, groups=2)
    report = attack(network, (6,), 1.0, "cross_entropy", restarts=6, steps=10)
    assert not report.violations(), report.worst
    plain = NormalisedMLP([6], 3, hidden=8)
    deltas = [certify(n, input_shape=(6,), input_bound=1.0, loss="cross_entropy").sensitivities("worst_case")
              for n in (network, plain)]  # fmt: skip
    assert deltas[0] != deltas[1]


def test_arms_of_trained_networks_differ_in_their_privacy_alone() -> None:
    networks = paper_000_networks
    made = {arm: networks.configuration("ConvNet, 83k", 4, arm, 0, 8.0) for arm in networks.ARMS}
    assert len({str(config["privacy"]) for config in made.values()}) == len(made)
    assert len({str(config["model"]) for config in made.values()}) == 1
    assert [arm for arm, config in made.items() if config["privacy"].get("allow_noncertified")] == [networks.PRINTED]
    with_groups, without = (networks.configuration("thin VGG", g, "DP-SGD", 0, 8.0)["model"] for g in (4, 0))
    assert with_groups != without
    counts = {len(networks.ENTRY.cells(Options(seeds=n))) for n in (1, 2)}
    assert counts == {56, 112}


@pytest.mark.skipif("not __import__('os').environ.get('LIPDP_DATA')", reason="reads tables below LIPDP_DATA")
def test_group_normalisation_is_the_only_difference_between_columns() -> None:
    table = SETS["GermanCredit"]
    one, two = (paper_000_table_5.training(table, "Lip-DP-SGD", groups, 0, 3) for groups in (8, 0))
    one["model"]["network"]["init_args"].pop("groups")
    two["model"]["network"]["init_args"].pop("groups")
    assert one == two and one["privacy"]["epsilon"] == table.epsilon


def test_the_paragraph_names_who_is_behind(tmp_path: Path) -> None:
    rows = [
        {"network": "ConvNet, 83k", "groups": 0, "arm": arm, "accuracy": accuracy, "certified_epsilon": 3.0}
        for arm, accuracy in (("DP-SGD", 0.9), ("bounds, layerwise", 0.6), ("exact norms", 0.95))
    ]
    text = paper_000_networks.finish(rows, Output(tmp_path, "networks"))
    assert "ConvNet, 83k: bounds, layerwise 60.0 % (DP-SGD 90.0 %)" in text and "exact norms" not in text
    assert paper_000_networks.ENTRY.claims[0].ours(rows) == "60.0 % against 90.0 %"


def test_clipping_functions_keep_norms_below_the_radius() -> None:
    for cell in paper_003_figures.function_cells(Options()):
        row = paper_003_figures.function_run(cell)
        assert float(row["clipped"]) <= paper_003_figures.RADIUS + 1e-9  # type: ignore[arg-type]
        if cell["clipping"] == "global":
            assert row["factor"] in (0.0, 1.0)
