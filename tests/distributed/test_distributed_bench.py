"""`lipdp bench --scaling`: both worlds are measured, and what it prints follows from them."""

from __future__ import annotations

import json

import pytest

from lipdp_lightning.bench.weak_scaling import STEPS_PER_TURN
from lipdp_lightning.cli import main


@pytest.mark.slow
def test_weak_scaling_measures_both_worlds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--scaling", "--batch-size", "4", "--repeats", "2", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["processes"], row["turns"], row["steps"]) == (2, 2, 2 * STEPS_PER_TURN)
    assert row["efficiency"] == row["one"] / row["many"]
    assert all(0 < row[name] < 60 for name in ("one", "many"))


@pytest.mark.parametrize("options", [["--scaling", "resnet"], ["--scaling", "--processes", "1"]])
def test_what_cannot_be_measured_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 2
    assert "HINT" in capsys.readouterr().err
