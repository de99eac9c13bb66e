"""The study of a thin WideResNet: one network and budget for all methods, and curves that are kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from lipdp_lightning.data_modules import CIFAR10
from lipdp_lightning.experiment.short_training import prepare
from lipdp_lightning.studies import wide_evidence
from lipdp_lightning.studies.wide_evidence import METHODS, InnerCIFAR10, config, table


@pytest.mark.parametrize("method", METHODS)
def test_methods_share_network_and_steps(method: str) -> None:
    prepared = prepare(config(method, 40))
    plan, first = prepared.plan, prepare(config("exact", 40)).plan
    assert plan.steps == 40 and plan.expected_batch_size == first.expected_batch_size
    if method != "no privacy":
        assert plan.noise_multiplier == first.noise_multiplier and plan.certified
    assert isinstance(prepared.experiment.datamodule, InnerCIFAR10)


def test_images_are_the_inner_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
    monkeypatch.setattr(CIFAR10, "_read", lambda self, part: (x, torch.zeros(2)))
    inner, _ = InnerCIFAR10()._read("train")
    assert torch.equal(inner, x[:, :, 8:24, 8:24])


def test_the_table_shows_the_last_point() -> None:
    points = [{"step": 2, "seconds": 1.0, "accuracy": 0.1}, {"step": 4, "seconds": 2.0, "accuracy": 0.25}]
    text = table([{"method": "exact", "seconds_per_step": 0.5, "points": points}])
    assert text.splitlines()[-1] == "| exact | 4 | 0.50 | 25.0 |"


@pytest.mark.slow
@pytest.mark.skipif("LIPDP_DATA" not in os.environ, reason="needs the data folder LIPDP_DATA")
def test_a_short_run_of_every_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_evidence, "TEST_ROWS", 100)
    file = tmp_path / "curves.jsonl"
    for method in METHODS:
        monkeypatch.setattr("sys.argv", ["wide_evidence", "--output", str(file), "--steps", "2", "--method", method])
        wide_evidence.main()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["method"] for row in rows] == list(METHODS)
    assert all([point["step"] for point in row["points"]] == [1, 2] for row in rows)
