"""The simulation: what it writes, the thesis's orders of growth, and what it refuses."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import pytest

from lipdp_lightning.studies.parties import simulate as simulation
from lipdp_lightning.studies.parties.simulate import METHODS, Cost, add_arguments, measure, run, simulate, sweep

FSS, TABLE, ROUNDS = METHODS[0], METHODS[1], METHODS[2]


def cost(method, **changes) -> Cost:
    return measure("", method, **({"parties": 1000, "servers": 2, "thresholds": 16, "levels": 8} | changes))


def test_growth_with_the_thresholds() -> None:
    """Section 6.4: a further threshold costs O(m) with function sharing, and O(n) with a round each."""
    fss = [cost(FSS, thresholds=b).protocol_bits for b in (10, 20, 30)]
    assert fss[1] - fss[0] == fss[2] - fss[1] == 10 * 2 * 2 * 64  # a question and an answer, to and from two servers
    rounds = [cost(ROUNDS, thresholds=b).protocol_bits for b in (10, 20)]
    assert rounds[1] == 2 * rounds[0] and rounds[0] > 10 * 1000 * 2 * 64


def test_growth_with_parties_levels_and_servers() -> None:
    by_parties = [cost(FSS, parties=n).protocol_bits for n in (1000, 2000, 3000)]
    assert by_parties[2] - by_parties[1] == pytest.approx(by_parties[1] - by_parties[0], rel=1e-3)
    keys = [cost(FSS, levels=b).message_bits for b in (8, 16, 24)]
    assert keys[1] - keys[0] == keys[2] - keys[1] == 8 * (8 * 24 + 1)
    assert cost(TABLE, levels=9).message_bits == 2 * cost(TABLE, levels=8).message_bits
    few, many = (cost(TABLE, servers=m).protocol_bits for m in (2, 5))
    assert many < 2 * few  # further servers get seeds


def test_the_thesis_s_crossing() -> None:
    """Function sharing wins for many thresholds, rounds for few."""
    assert cost(FSS, thresholds=1, levels=12).protocol_bits > cost(ROUNDS, thresholds=1, levels=12).protocol_bits
    assert cost(FSS, thresholds=200, levels=12).protocol_bits < cost(ROUNDS, thresholds=200, levels=12).protocol_bits


def test_files(tmp_path: Path) -> None:
    axes = {"thresholds": [1, 4], "servers": [2, 3], "parties": [10, 20], "levels": [4, 5]}
    paths = simulate(tmp_path, thresholds=8, levels=5, axes=axes, processes=0)
    names = {"costs.csv", "sessions.json", "figure-6.6.6a.svg", "figure-6.6.6b.svg", "parties.svg", "levels.svg"}
    assert {path.name for path in paths} == names == {path.name for path in tmp_path.iterdir()}
    rows = list(csv.DictReader((tmp_path / "costs.csv").open()))
    expected = sweep(simulation.BANK_RECORDS, 2, 8, 5, axes)
    assert [int(row["protocol_bits"]) for row in rows] == [row.protocol_bits for row in expected]
    assert {row["source"] for row in rows} == {simulation.MEASURED, simulation.MODEL}
    fss = [row for row in rows if row["method"] == "fss" and row["figure"] == "servers"]
    assert [row["servers"] for row in fss] == ["2"]  # two servers only: nothing is measured that does not exist
    assert (tmp_path / "figure-6.6.6a.svg").read_text().count("<svg") == 1


def test_nothing_is_written_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(simulation, "_svg", fails)
    with pytest.raises(OSError):
        simulate(tmp_path / "out", axes={"parties": [10]}, processes=0)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_sessions_between_processes_count_the_same(tmp_path: Path) -> None:
    rows = simulation.session_counts(3)
    assert len(rows) == len(METHODS) and all(row["agree"] for row in rows)


@pytest.mark.parametrize(
    "options",
    [
        ["--servers", "1"],
        ["--levels", "40"],
        ["--levels", "3"],
        ["--parties", "0"],
        ["--processes", "99"],
        ["--vary-servers", "2,100"],
    ],
)
def test_bad_numbers(options: list[str], tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(ValueError, match="HINT"):
        run(parser.parse_args(["--output", str(tmp_path), *options]))
    assert not list(tmp_path.iterdir())
