"""Ordinary projects are made private in three lines, keep their habits, and learn; two are refused, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from projects import LEAN, WITHOUT_FILES, changed_lines, private_main

# the metric of each project, what chance reaches, and what it must reach at epsilon 8
LEARNS = {
    "image_classifier": ("test_acc", 0.1, 0.8),
    "table_classifier": ("val_acc", 0.63, 0.8),
    "multi_label": ("test_acc", 0.55, 0.75),
    "regression": ("test_r2", 0.0, 0.5),
    "rare_class": ("test_auroc", 0.5, 0.8),
    "transfer": ("test_acc", 0.1, 0.8),
    "data_module": ("test_acc", 0.1, 0.8),
    "compiled": ("test_acc", 0.1, 0.8),
}


@pytest.mark.parametrize("name", LEARNS)
def test_a_project_learns_in_three_changed_lines(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metric, chance, least = LEARNS[name]
    reached = private_main(name, tmp_path, monkeypatch)(**WITHOUT_FILES)
    print(name, reached)
    assert least > chance and reached[metric] >= least
    assert changed_lines(name) == 3


def test_a_project_with_all_habits_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    reached = private_main("full_project", tmp_path, monkeypatch)(folder=tmp_path / "run", **LEAN)
    print(reached)
    assert reached["val_acc"] >= 0.8
    assert changed_lines("full_project") == 3


def test_a_plain_loop_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = private_main("plain_loop", tmp_path, monkeypatch)()
    assert reached["test_acc"] >= 0.8
    assert changed_lines("plain_loop") == 9


@pytest.mark.parametrize("name", ["two_optimizers", "manual_optimization"])
def test_what_cannot_be_private_is_refused_with_the_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"optimizes by hand, and its own backward passes would bypass.*HINT"):
        private_main(name, tmp_path, monkeypatch)(**WITHOUT_FILES)
