"""The study of forecasts: its cells, its file and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lipdp_lightning.studies.forecast import Cell, cells, confusion, study


def test_cells_are_many_and_different(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIPDP_DATA", raising=False)
    names = [cell.name for cell in cells()]
    assert len(names) == len(set(names)) >= 40 and not any("MNIST" in name for name in names)
    monkeypatch.setenv("LIPDP_DATA", "anywhere")
    assert sum("MNIST" in cell.name for cell in cells()) == 10


def test_a_study_goes_on_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, trained = tmp_path / "cells.jsonl", []
    run = Cell.run
    monkeypatch.setattr(Cell, "run", lambda self: trained.append(self.name) or run(self))
    only = "Linear; EmbeddedWine; auto; 3"
    (row,) = study(file, only)
    assert row["learned"] and row["expected"] and row["chance"] == pytest.approx(1 / 3)
    assert study(file, only) == [row] and trained == [only]
    assert json.loads(file.read_text()) == row


def test_the_table_counts_and_names_what_was_wrong() -> None:
    def row(name: str, expected: bool, learned: bool) -> dict[str, object]:
        return {
            "cell": name, "expected": expected, "learned": learned, "forecast": 0.5, "accuracy": 0.1, "chance": 0.1,
        }  # fmt: skip

    rows = [row("a", True, True), row("b", True, True), row("c", True, False), row("d", False, False)]
    text = confusion(rows)
    assert "| expected to learn | 2 | 1 |" in text and "| not expected to learn | 0 | 1 |" in text
    assert "| c | 0.50 | 0.10 | 0.10 |" in text and "| d |" not in text
