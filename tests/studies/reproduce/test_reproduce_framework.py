"""The framework with a tiny entry: rows survive failures, kills and other options."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_entries

from lipdp_lightning.cli import main
from lipdp_lightning.studies.reproduce import Options, quoted, summarize
from lipdp_lightning.studies.reproduce.catalogue import Listed, catalogue, find
from lipdp_lightning.studies.reproduce.entry import checked_result, text_of, value_of
from lipdp_lightning.studies.reproduce.entry_run import reproduce
from lipdp_lightning.studies.reproduce.store import Store, to_csv

HERE = Path(__file__).parent


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "told"
    folder.mkdir()
    monkeypatch.setenv("COUNT_CALLS", str(folder))
    return folder


def listed(name: str = "tiny") -> Listed:
    return Listed(next(entry for entry in tiny_entries.ENTRIES if entry.name == name), "tiny_entries")


def called(folder: Path) -> list[str]:
    return (folder / "calls").read_text().split() if (folder / "calls").exists() else []


def test_rows_are_in_the_order_of_the_cells_whoever_finishes_first(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    made = reproduce(listed(), tmp_path / "out", jobs=2)
    with open(tmp_path / "out/tiny.csv", newline="") as stream:
        written = list(csv.DictReader(stream))
    wanted = [(m, level, seed) for m in ("1e3", "other") for level in ("0.1", "2.0") for seed in ("0", "1")]
    assert [(row["method"], row["level"], row["seed"]) for row in written] == wanted
    assert sorted(called(calls)) == sorted("-".join(cell) for cell in wanted)
    assert float(written[0]["value"]) == 1 / 3 and written[0]["note"] == 'a,"b"'
    assert {row["threads"] for row in written} == {"1"} and os.environ["OMP_NUM_THREADS"] == "3"
    assert made.rows[0]["method"] == "1e3" and made.rows[4]["note"] is None
    page = made.page.read_text()
    assert "There are 8 rows." in page and "| largest value | 2 | 1.333 |" in page
    assert "| other | 2 |" in page and "none (not private)" in page and "certified ε" in page
    for ending in ("png", "svg"):
        assert (tmp_path / f"out/tiny.{ending}").stat().st_size > 1000
    assert "![values against levels](tiny.png)" in page


def test_a_finished_cell_is_not_run_again_and_a_failed_one_is(calls: Path, tmp_path: Path) -> None:
    (calls / "fail-other-0.1-1").touch()
    (calls / "die-1e3-2.0-0").touch()
    made = reproduce(listed(), tmp_path, jobs=1)
    assert [row["error"] for row in made.failed] == [
        "its process ended with code 7", "RuntimeError: no luck, as told",
    ]  # fmt: skip
    assert len(made.rows) == 6 and len(called(calls)) == 8
    page = made.page.read_text()
    assert "6 of 8 cells" in page and "There are" not in page and not (tmp_path / "tiny.png").exists()
    assert "no luck,\nas told" in (tmp_path / "tiny.log").read_text()
    (calls / "fail-other-0.1-1").unlink()
    (calls / "die-1e3-2.0-0").unlink()
    (calls / "calls").unlink()
    made = reproduce(listed(), tmp_path, jobs=1)
    assert sorted(called(calls)) == ["1e3-2.0-0", "other-0.1-1"]
    assert len(made.rows) == 8 and not made.failed and "There are 8 rows." in made.page.read_text()
    assert [row["value"] for row in made.rows] == [1 / 3, 4 / 3] * 4
    (calls / "calls").unlink()
    again = reproduce(listed(), tmp_path, jobs=1)
    assert called(calls) == [] and again.rows == made.rows


def test_a_killed_run_continues(calls: Path, tmp_path: Path) -> None:
    """Ctrl-C ends the workers too; what was finished stays, and is not run again."""
    (calls / "wait-other-0.1-0").touch()
    code = (
        # a job in the background ignores the signal
        "import sys, signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from lipdp_lightning.commands import reproduce as command;"
        "import lipdp_lightning.studies.reproduce.catalogue as c; import tiny_entries;"
        "c.catalogue = lambda: {e.name: c.Listed(e, 'tiny_entries') for e in tiny_entries.ENTRIES};"
        "c.find = lambda name: c.catalogue()[name];"
        "from lipdp_lightning.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    script = tmp_path / "script.py"
    script.write_text(f"if __name__ == '__main__':\n    {code}\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    process = subprocess.Popen(
        [sys.executable, str(script), "reproduce", "tiny", "--out", str(tmp_path)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while "other-0.1-0" not in called(calls) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and "the same command continues" in errors
    assert len(called(calls)) == 5
    (calls / "wait-other-0.1-0").unlink()
    (calls / "calls").unlink()
    made = reproduce(listed(), tmp_path)
    assert called(calls) == ["other-0.1-0", "other-0.1-1", "other-2.0-0", "other-2.0-1"] and len(made.rows) == 8


def test_more_repetitions_are_added_and_other_options_refused(calls: Path, tmp_path: Path) -> None:
    reproduce(listed(), tmp_path, Options(seeds=1))
    reproduce(listed(), tmp_path, Options(seeds=2))
    assert len(called(calls)) == 8
    before = (tmp_path / "tiny.csv").read_bytes()
    newer = replace(listed().entry, version=2)
    for wrong, options in ((listed(), Options(seeds=1)), (listed(), Options(quick=True)), (Listed(newer, ""), None)):
        with pytest.raises(ValueError, match=r"another run.*HINT"):
            reproduce(wrong, tmp_path, options)
    (tmp_path / "tiny.csv").write_bytes(before.replace(b"0.1,", b"0.5,"))
    with pytest.raises(ValueError, match="line 2 is not a cell"):
        reproduce(listed(), tmp_path)
    assert len(called(calls)) == 8


def test_one_process_per_file(calls: Path, tmp_path: Path) -> None:
    from lipdp_lightning.studies.reproduce.store import locked

    with locked(tmp_path / ".tiny.lock"), pytest.raises(ValueError, match=r"another process"):
        reproduce(listed(), tmp_path)
    assert called(calls) == []


def test_rows_say_what_is_private(calls: Path, tmp_path: Path) -> None:
    made = reproduce(listed("tiny-silent"), tmp_path, Options(seeds=1))
    assert len(made.failed) == 4 and "certified_epsilon, delta, adjacency" in str(made.failed[0]["error"])
    with pytest.raises(ValueError, match="repeats seed"):
        checked_result({"seed": 1}, {"seed": 1, "certified_epsilon": 1.0, "delta": 0.0, "adjacency": "add_remove"})
    with pytest.raises(ValueError, match="list"):
        checked_result({}, {"certified_epsilon": 1.0, "delta": 0.0, "adjacency": "", "x": [1]})  # type: ignore[dict-item]


def test_means_never_mix_epsilons(calls: Path, tmp_path: Path) -> None:
    made = reproduce(listed("tiny-means"), tmp_path)
    lines = [line for line in made.page.read_text().splitlines() if line.startswith("| other")]
    assert lines[0] == "| other | 0.1 | 0.1 | 1e-05 | add_remove | 2 | 0.8333 | 0.7071 |" and len(lines) == 2
    mixed = summarize(made.rows, ["method"], ["value"])
    with pytest.raises(AssertionError, match="leaves out certified_epsilon"):
        from lipdp_lightning.studies.reproduce.entry_page import rows_table

        rows_table(mixed)


def test_missing_data_is_named_before_anything_is_run(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIPDP_DATA", raising=False)
    with pytest.raises(ValueError, match="LIPDP_DATA"):
        reproduce(listed("tiny-data"), tmp_path / "out")
    (tmp_path / "tabular").mkdir()
    (tmp_path / "tabular/b.csv.gz").touch()
    monkeypatch.setenv("LIPDP_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"has no tabular/a\.csv\. HINT"):
        reproduce(listed("tiny-data"), tmp_path / "out")
    assert called(calls) == [] and not (tmp_path / "out").exists()


def test_the_file_is_whole_whenever_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "a.csv", [{"x": 1}, {"x": None}, {"y": "z"}], "us")
    store.add(1, {"r": 2.5}, 1.0)
    before = (tmp_path / "a.csv").read_bytes()
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        store.add(0, {"r": 1}, 1.0)
    assert (tmp_path / "a.csv").read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    monkeypatch.undo()
    store = Store(tmp_path / "a.csv", [{"x": 1}, {"x": None}, {"y": "z"}], "us")
    assert store.pending() == [0, 2] and store.finished() == [{"x": None, "r": 2.5, "cpu_seconds": 1.0}]
    (tmp_path / "a.csv").write_bytes(before[:-4])
    with pytest.raises(ValueError, match="line 2"):
        Store(tmp_path / "a.csv", [{"x": None}], "us")


def test_values_come_back_as_they_were() -> None:
    values = [None, True, False, 0, -3, 0.1, 1e-300, float("inf"), 1 / 3, "text", "a b"]
    assert [value_of(text_of(value)) for value in values] == values
    assert to_csv([{"a": 1}, {"b": "x,y", "error": None}]).splitlines() == ["a,b,error", "1,,", ',"x,y",']


def test_the_command_lists_and_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["reproduce", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{name} " in shown for name in catalogue())
    for words, text in (
        ([], "no NAME"), (["nonsense"], "no entry"), (["a", "--jobs", "0"], "--jobs 0"), (["a", "--seeds", "0"], "1"),
    ):  # fmt: skip
        assert main(["reproduce", *words, "--out", str(tmp_path / "none")]) == 2
        assert text in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match=r"did you mean thesis-6\.6\.1"):
        find("thesis-6.6.11")


def test_a_page_quotes_what_was_found_between_its_marks(calls: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin tiny -->\n\nstale 17\n\n<!-- end tiny -->\nafter\n")
    (calls / "fail-other-0.1-1").touch()
    reproduce(listed(), tmp_path / "out", into=page)
    assert "stale 17" in page.read_text(), "a run with a failed cell wrote the page"
    (calls / "fail-other-0.1-1").unlink()
    reproduce(listed(), tmp_path / "out", into=page)
    text = page.read_text()
    assert text.startswith("before\n<!-- begin tiny -->") and text.endswith("<!-- end tiny -->\nafter\n")
    assert "There are 8 rows." in text and "certified ε" in text and "stale" not in text
    reproduce(listed(), tmp_path / "out", into=page)
    assert page.read_text() == text
    for broken in ("", "<!-- begin tiny -->", "<!-- end tiny --> <!-- begin tiny -->"):
        page.write_text(broken)
        with pytest.raises(ValueError, match="no place for tiny"):
            reproduce(listed(), tmp_path / "new", into=page)
    assert not (tmp_path / "new").exists()


def test_a_page_leaves_a_long_table_to_the_files(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    for most, shown in ((8, True), (7, False)):
        monkeypatch.setattr(quoted, "MOST_ROWS", most)
        page.write_text("<!-- begin tiny -->\n<!-- end tiny -->\n")
        reproduce(listed(), tmp_path / "out", into=page)
        text = page.read_text()
        assert ("| certified ε |" in text) is shown and ("The command writes all 8 rows" in text) is not shown
        assert "There are 8 rows." in text


def test_help_loads_no_entries() -> None:
    code = (
        "import sys; from lipdp_lightning.cli import main\n"
        "try: main(['reproduce', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'numpy', 'torch', 'lipdp_lightning.studies.reproduce'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=HERE.parents[1])
