"""`lipdp bench --scaling` measures one process, several, and several apart, and prints what follows from them."""

from __future__ import annotations

import json

import pytest

from lipdp_lightning.bench.weak_scaling import STEPS_PER_TURN, as_row, printed, summarized
from lipdp_lightning.cli import main


@pytest.mark.slow
def test_weak_scaling_measures_all_worlds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--scaling", "--batch-size", "4", "--repeats", "2", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["processes"], row["turns"], row["steps"]) == (2, 2, 2 * STEPS_PER_TURN)
    assert 0 < row["lowest"] <= row["efficiency"] <= row["highest"]
    assert all(0 < row[name] < 60 for name in ("one", "many", "alone", "beside_apart"))


def test_one_turn_that_was_disturbed_moves_nothing() -> None:
    one = [[1.0] * 8, [1.0] * 8, [1.0] * 7 + [90.0], [2.0] * 8, [9.0] * 8]
    many = [[1.25] * 8, [1.25] * 8, [1.25] * 8, [2.5] * 8, [90.0] * 8]
    alone = [[1.0] * 8, [1.0] * 8, [50.0] * 8, [2.0] * 8, [9.0] * 8]
    found = summarized("m", 256, 2, [one, many, alone], 2, 0.2)
    assert found.efficiency == found.lowest == found.highest == 0.8 and found.is_quiet and found.steps == 40
    assert found.beside_apart == 0.8 and found.alone == 2.0
    assert "share processors" not in printed(as_row(found))
    loud = summarized("m", 256, 2, [one[:1], many[:1], alone[:1]], 2, 3.0)
    assert not loud.is_quiet and "this says nothing" in printed(as_row(loud)) and loud.efficiency == 0.8


@pytest.mark.parametrize("options", [["--scaling", "resnet"], ["--scaling", "--processes", "1"]])
def test_what_cannot_be_measured_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 2
    assert "HINT" in capsys.readouterr().err
