"""The table of docs/your_project.md: the same projects made private here and with opacus, under the same plan.

The test prints the table, and fails if a number on the page is not what was measured now, up to its spread.
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest
from projects import METRICS, changed_lines, options_of, private_main

PAGE = Path(__file__).parents[2] / "docs" / "your_project.md"
WAYS = {"without privacy": "", "opacus": "opacus.diff", "lipdp-lightning": "diff"}
SEEDS = 3
SPREAD = 4.0  # in per cent: the means of three runs, and opacus and privatize draw new noise in each


def measured(name: str, diff: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Returns the mean of a project's metric over seeds, in per cent."""
    metric, options = METRICS[name], options_of(name, folder)
    runs = [private_main(name, folder, monkeypatch, seed, diff)(**options) for seed in range(SEEDS)]
    return 100 * statistics.mean(run[metric] for run in runs)


def on_the_page() -> dict[str, list[float]]:
    rows = re.findall(r"^\| `(\w+)` \|([\d |.]+)\|$", PAGE.read_text(), re.MULTILINE)
    return {name: [float(cell) for cell in cells.split("|")] for name, cells in rows}


def test_the_page_counts_the_changed_lines() -> None:
    assert set(on_the_page()) == set(METRICS)
    for name, cells in on_the_page().items():
        assert cells[-2:] == [changed_lines(name, "opacus.diff"), changed_lines(name)]


@pytest.mark.slow
@pytest.mark.parametrize("name", METRICS)
def test_the_page_states_the_accuracies(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opacus")
    monkeypatch.setenv("WANDB_SILENT", "true")
    found = [measured(name, diff, tmp_path, monkeypatch) for diff in WAYS.values()]
    counts = [changed_lines(name, "opacus.diff"), changed_lines(name)]
    print(f"| `{name}` | {' | '.join(f'{accuracy:.1f}' for accuracy in found)} | {counts[0]} | {counts[1]} |")
    assert on_the_page()[name][:3] == pytest.approx(found, abs=SPREAD)
