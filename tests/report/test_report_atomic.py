"""A report file is complete or not there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_examples import healthy

from lipdp_lightning.report import write
from lipdp_lightning.report.atomic import atomic_writer, write_all_atomically, write_atomically


class Interrupted(Exception):
    """Something went wrong half-way."""


def interrupted_atomic(path: Path) -> None:
    with atomic_writer(path) as stream:
        stream.write("half of the new")
        stream.flush()
        raise Interrupted


def interrupted_naive(path: Path) -> None:
    with open(path, "w") as stream:
        stream.write("half of the new")
        stream.flush()
        raise Interrupted


def survives(path: Path, writer: Callable[[Path], None]) -> bool:
    """Whether an interrupted writer leaves the directory as it was, without and with an old file."""
    with pytest.raises(Interrupted):
        writer(path)
    clean = not list(path.parent.iterdir())
    path.write_text("old")
    with pytest.raises(Interrupted):
        writer(path)
    return clean and path.read_text() == "old" and list(path.parent.iterdir()) == [path]


def test_an_interrupted_writer_leaves_no_file_and_keeps_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert survives(tmp_path / "a" / "report.html", interrupted_atomic)
    assert not survives(tmp_path / "b" / "report.html", interrupted_naive)


def test_a_killed_process_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    program = (
        "import os, sys\n"
        "from lipdp_lightning.report.atomic import atomic_writer\n"
        "with atomic_writer(sys.argv[1]) as stream:\n"
        "    stream.write('half'); stream.flush(); os._exit(9)\n"
    )
    result = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert result.returncode == 9
    assert path.read_text() == "old"


def test_new_content_replaces_the_old_with_the_permissions_of_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "report.md"
    write_atomically(path, "a much longer old text")
    write_atomically(path, "new ε\n")
    assert path.read_bytes() == "new ε\n".encode()
    plain = tmp_path / "plain"
    plain.write_text("")
    assert path.stat().st_mode == plain.stat().st_mode
    assert os.listdir(path.parent) == ["report.md"]


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    with atomic_writer(path) as first, atomic_writer(path) as second:
        first.write("first")
        second.write("second")
    assert path.read_text() == "first"  # the last to end
    assert os.listdir(tmp_path) == ["report.md"]


def test_a_set_of_files_is_not_touched_when_one_of_them_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old a")
    contents: dict[str, Any] = {"a": "new a", "b": 3}
    with pytest.raises(TypeError):
        write_all_atomically(tmp_path, contents)
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old a"


def test_a_renderer_that_raises_leaves_the_run_directory_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write.write_report(tmp_path, healthy(title="old"))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"privacy_report.json", "privacy_report.md", "report.html"}

    def broken(facts: Any) -> str:
        raise Interrupted

    monkeypatch.setattr(write, "render_html", broken)
    with pytest.raises(Interrupted):
        write.write_report(tmp_path, healthy(title="new"))
    with pytest.raises(Interrupted):
        write.write_report(tmp_path / "fresh", healthy(title="new"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_paths_of_the_report_are_returned(tmp_path: Path) -> None:
    paths = write.write_report(tmp_path / "deep" / "run", healthy())
    assert set(paths) == {write.JSON_NAME, write.MARKDOWN_NAME, write.HTML_NAME}
    assert all(path.parent == tmp_path / "deep" / "run" and path.stat().st_size > 0 for path in paths.values())
