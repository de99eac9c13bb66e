"""Ordinary projects are made private in three lines, keep their habits, and learn; two are refused, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from projects import METRICS, WITHOUT_FILES, changed_lines, options_of, private_main

from lipdp_lightning.training import private_steps

# samples and noise are the same in every run, since few examples make some runs end far below others
SECRET = bytes(range(16))
# what chance reaches, and what a project must reach at epsilon 8
LEARNS = {
    "image_classifier": (0.1, 0.8), "table_classifier": (0.63, 0.8), "multi_label": (0.55, 0.75),
    "regression": (0.0, 0.5), "rare_class": (0.5, 0.8), "transfer": (0.1, 0.8), "data_module": (0.1, 0.8),
    "full_project": (0.1, 0.8), "compiled": (0.1, 0.8), "plain_loop": (0.1, 0.8),
}  # fmt: skip


@pytest.mark.parametrize("name", LEARNS)
def test_a_project_learns_in_three_changed_lines(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(private_steps, "new_secret", lambda: SECRET)
    chance, least = LEARNS[name]
    reached = private_main(name, tmp_path, monkeypatch)(**options_of(name, tmp_path))
    print(name, reached)
    assert least > chance and reached[METRICS[name]] >= least
    assert changed_lines(name) == (9 if name == "plain_loop" else 3)  # a loop states its plan in full


@pytest.mark.parametrize("name", ["two_optimizers", "manual_optimization"])
def test_what_cannot_be_private_is_refused_with_the_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"optimizes by hand, and its own backward passes would bypass.*HINT"):
        private_main(name, tmp_path, monkeypatch)(**WITHOUT_FILES)
