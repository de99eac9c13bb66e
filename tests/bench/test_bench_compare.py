"""The comparison from the command line to its files, also of what runs out of memory or cannot run."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from lipdp_lightning.bench.comparison_files import as_csv, as_markdown, printed, write_all
from lipdp_lightning.bench.contender_rows import OUT_OF_MEMORY, Row, quartiles, ratios_of
from lipdp_lightning.cli import main
from lipdp_lightning.studies.performance_page import SECTIONS, replaced, sections_of

ROOT = Path(__file__).parents[2]
MACHINE: dict[str, Any] = {
    "device": "cpu",
    "threads": [1],
    "processors": 2,
    "load": 0.0,
    "torch": "2",
    "command": "lipdp bench",
}
OWN = """
from lipdp_lightning.bench.contenders import _trains
def hungry(job, between):
    held = []
    while True:
        between()
        held.append(bytearray(b"x") * 10**8)
@_trains
def unsupported(job, model):
    raise NotImplementedError("this layer has no ghost norm")
"""


@pytest.mark.slow
def test_contenders_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    contenders = ["torch", "joint", "own:hungry", "own:unsupported"]
    arguments = ["bench", "--model", "mlp-256x3", "--batch-size", "64", "--contender", *contenders, "--threads", "1"]
    limits = ["--memory-limit", "1.6", "--repeats", "5", "--out", "results", "--json"]
    assert main([*arguments, *limits]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "results/bench.json").read_text())
    rows = {row["contender"]: row for row in found["rows"]}
    assert list(rows) == contenders
    assert [row["status"] for row in rows.values()] == ["ok", "ok", OUT_OF_MEMORY, "cannot run"]
    assert "no ghost norm" in rows["own:unsupported"]["reason"]
    ours = rows["joint"]
    assert ours["parameters"] == 2 * 256 * 257 + 2570 and ours["rounds"] == 5 and ours["steps"] >= 5
    low, high = ours["ratio_quartiles"]
    assert 1 < low <= ours["ratio"] <= high < 50, "private steps add certificate and noise to those of torch"
    assert rows["torch"]["ratio"] == 1 and ours["peak_memory"] > ours["set_up_memory"] > 4 * ours["parameters"]
    assert ours["set_up_memory"] > rows["torch"]["set_up_memory"], "private runs keep what bounds refer to"
    assert ours["memory_ratio"] == ours["peak_memory"] / rows["torch"]["peak_memory"]
    assert rows["torch"]["memory_ratio"] == rows["torch"]["resident_ratio"] == 1
    parts = ours["parts"]
    assert {"forward and backward", "certificate", "noise", "release", "projection", "data"} <= set(parts)
    assert all(seconds > 0 for seconds in parts.values())
    assert parts["forward and backward"] < 3 * ours["seconds"]
    names = {path.name for path in (tmp_path / "results").iterdir()}
    assert names == {
        "bench.json",
        "bench.csv",
        "bench.md",
        *(f"mlp-256x3-{k}.png" for k in ("time", "memory", "parts")),
    }


def row(contender: str, seconds: float, **more: Any) -> Row:
    times = {
        "seconds": seconds,
        "seconds_quartiles": (seconds, seconds),
        "ratio": seconds,
        "ratio_quartiles": (1.0, 2.0),
    }
    memory = {"peak_memory": 10**6, "memory_ratio": 1.5, "set_up_memory": 10**5}
    return Row("mlp-8x2", 64, contender, epoch_seconds=2.5, **{**times, **memory, **more})


ROWS = [
    row("torch", 1.0),
    row("joint", 1.25, parts={"noise": 0.25, "rest": 1.0}, beside={"noise": 0.5}),
    Row("mlp-8x2", 64, "opacus", OUT_OF_MEMORY, "ended at the memory limit"),
]


def test_every_output_names_what_has_no_result() -> None:
    for text in (printed(ROWS, MACHINE), as_markdown(ROWS, MACHINE)):
        assert "out of memory" in text and "ended at the memory limit" in text
        assert "1.25 " in text and "250" in text
    lines = list(csv.DictReader(as_csv(ROWS).splitlines()))
    assert [line["status"] for line in lines] == ["ok", "ok", OUT_OF_MEMORY]
    assert (lines[1]["ratio_low"], lines[1]["part noise"], lines[2]["seconds"]) == ("1.0", "0.25", "")


def test_plots_of_a_model_that_nobody_could_train(tmp_path: Path) -> None:
    written = write_all(tmp_path, [Row("wrn-16-4", 64, name, OUT_OF_MEMORY) for name in ("torch", "joint")], MACHINE)
    assert {path.name for path in written} == {"bench.json", "bench.csv", "bench.md"}
    assert ".png" not in (tmp_path / "bench.md").read_text()


def test_ratios_are_of_the_same_round() -> None:
    slow, fast = (
        Row("m", 1, "a", round_seconds={0: 2.0, 1: 40.0, 2: 9.0}),
        Row("m", 1, "b", round_seconds={0: 1.0, 1: 10.0}),
    )
    assert ratios_of(slow, fast) == [2.0, 4.0]
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0) and quartiles([7.0]) == (7.0, 7.0)


def test_a_page_keeps_its_prose_and_gets_new_sections() -> None:
    page = "a\n<!-- bench: steps -->\nold\n<!-- end -->\nb\n<!-- bench: memory -->\nkept\n<!-- end -->\n"
    assert replaced(page, {"steps": "new\n"}) == page.replace("old", "new")
    with pytest.raises(ValueError, match="no section growth"):
        replaced(page, {"growth": ""})


def test_the_page_of_the_documentation_has_every_section() -> None:
    assert sections_of((ROOT / "docs/performance.md").read_text(encoding="utf-8")) == list(SECTIONS)
