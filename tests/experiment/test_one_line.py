"""Errors as a command shows them: a line for each problem, which ends with its hint."""

from __future__ import annotations

import pytest

from lipdp_lightning.experiment.one_line import LONGEST_LINE, shown
from lipdp_lightning.files import not_written


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (ValueError("a is wrong.\nHINT: use b."), ["a is wrong. HINT: use b."]),
        (ValueError("a. HINT: b\nc. HINT: d"), ["a. HINT: b", "c. HINT: d"]),
        (ValueError("x, 2 problem(s):\n  - a. HINT: b\n  - c. HINT: d"),
         ["x, 2 problem(s):", "  - a. HINT: b", "  - c. HINT: d"]),
        (ValueError("--run_dir one\nlipdp: two\nthree is none. HINT: b\nc. HINT: d"),
         ["--run_dir one lipdp: two three is none. HINT: b", "c. HINT: d"]),
        (ValueError("no hint"), ["no hint HINT: `lipdp fit --help` lists the options."]),
        (ValueError("a. HINT: b\nand more"), ["a. HINT: b", "and more"]),
        (FileNotFoundError(2, "No such file or directory", "x.csv"),
         ["x.csv: No such file or directory. HINT: `lipdp fit --help` lists the options."]),
        (OSError(5, "Input/output error"), ["Input/output error. HINT: `lipdp fit --help` lists the options."]),
        (OSError("cannot identify"), ["cannot identify HINT: `lipdp fit --help` lists the options."]),
        (KeyError("a\nb"), ["KeyError: 'a\\nb' HINT: `lipdp fit --help` lists the options."]),
    ],
)  # fmt: skip
def test_a_line_for_each_problem(error: BaseException, lines: list[str]) -> None:
    assert shown("fit", error).splitlines() == lines


def test_an_error_of_our_own_writer_keeps_its_words() -> None:
    error = not_written("run.json", OSError(28, "No space left on device", "a"), "All is safe.")
    assert shown("fit", error) == str(error) and "make room" in str(error)


@pytest.mark.parametrize("command", ["fit", "reproduce"])
def test_lines_with_the_name_of_the_command_are_short(command: str) -> None:
    line = shown(command, ValueError("x" * 6000 + ". HINT: " + "y" * 6000))
    assert len(f"lipdp {command}: {line}") <= LONGEST_LINE
