"""The study of a thin WideResNet: one network and budget for all methods, which take turns."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lipdp_lightning.data_modules import CIFAR10
from lipdp_lightning.experiment.short_training import prepare
from lipdp_lightning.models import WideResNet
from lipdp_lightning.studies import wide_evidence
from lipdp_lightning.studies.wide_evidence import (
    METHODS,
    TRAINED,
    PooledCIFAR10,
    Turns,
    config,
    draw,
    read_notes,
    standardize_all,
    table,
)

NOTES = """method,step,steps,cpu_seconds,rows,accuracy,average_accuracy
exact norms,2,4,1.00,50,0.1000,0.1100
no privacy,2,4,0.30,50,0.1500,0.1500
exact norms,4,4,2.00,100,0.2500,0.2600
no privacy,4,4,0.50,100,0.3500,0.4000
"""


@pytest.mark.parametrize("method", METHODS)
def test_methods_share_network_and_steps(method: str) -> None:
    prepared = prepare(config(method, 40, 256))
    plan, first = prepared.plan, prepare(config("exact norms", 40, 256)).plan
    assert plan.steps == 40 and plan.expected_batch_size == first.expected_batch_size
    if method != "no privacy":
        assert plan.noise_multiplier == first.noise_multiplier and plan.certified
    assert isinstance(prepared.experiment.datamodule, PooledCIFAR10)


def test_images_are_means_of_four_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randint(0, 255, (2, 3, 32, 32), dtype=torch.uint8)
    monkeypatch.setattr(CIFAR10, "_read", lambda self, part: (x, torch.zeros(2)))
    pooled, _ = PooledCIFAR10()._read("train")
    assert pooled.shape == (2, 3, 16, 16) and pooled.dtype == torch.uint8
    assert abs(float(pooled[1, 2, 5, 7]) - float(x[1, 2, 10:12, 14:16].float().mean())) <= 0.5


def test_all_kernels_are_standardised_alike() -> None:
    network = WideResNet((3, 16, 16), 10, 10, 1)
    standardize_all(network)
    rows = network.features[1].body[2].weight.flatten(1)
    assert float(rows.mean(1).abs().max()) < 1e-6
    assert float(rows.norm(dim=1).std()) < 1e-6


def test_turns_go_round_and_skip_who_is_done() -> None:
    turns = Turns(3)
    turns.wait(0)
    turns.hand_over(0)
    turns.wait(1)
    turns.hand_over(1, done=True)
    turns.wait(2)
    turns.hand_over(2)
    turns.wait(0)
    turns.hand_over(0)
    turns.wait(2)  # not 1, which is done
    turns.hand_over(2, done=True)
    turns.wait(0)


def test_the_table_and_the_figure_show_the_notes(tmp_path: Path) -> None:
    file = tmp_path / "curves.csv"
    file.write_text(NOTES)
    notes = read_notes(file)
    assert table(notes).splitlines()[-2:] == [
        "| exact norms | 4 | 1.00 | 25.0 | 26.0 |", "| no privacy | 4 | 0.25 | 35.0 | 40.0 |",
    ]  # fmt: skip
    draw(notes, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.skipif("LIPDP_DATA" not in os.environ, reason="needs the data folder LIPDP_DATA")
def test_a_short_run_of_every_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "curves.csv"
    options = ["--output", str(file), "--steps", "2", "--batch", "64"]
    monkeypatch.setattr("sys.argv", ["wide_evidence", *options])
    wide_evidence.main()
    notes = read_notes(file)
    assert sorted(notes) == sorted(TRAINED)
    assert all([row["step"] for row in rows] == [1, 2] for rows in notes.values())
