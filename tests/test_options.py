"""Options for a run in little time (conftest.py): what is left out says so, and another order loses nothing."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Five files of three tests, below the same conftest.py."""
    shutil.copy(HERE / "conftest.py", tmp_path)
    (tmp_path / "slow_tests.txt").touch()
    for name in "abcde":
        tests = "".join(f"def test_{number}():\n    assert True is not {number}\n\n" for number in range(3))
        (tmp_path / f"test_{name}.py").write_text(tests)
    return tmp_path


def run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-c", "/dev/null", f"--rootdir={folder}", str(folder)]
    return subprocess.run([*command, *arguments], capture_output=True, text=True).stdout


def test_what_would_begin_too_late_is_skipped_and_says_so(small: Path) -> None:
    late, early = (run(small, "--within", seconds) for seconds in ("0", "600"))
    assert "later than the 0 s of --within" in late and "15 skipped" in late and "passed" not in late
    assert "15 passed" in early and "skipped" not in early


def test_listed_cases_are_slow_tests(small: Path) -> None:
    first = next(line for line in run(small, "--collect-only").splitlines() if "::" in line)
    (small / "slow_tests.txt").write_text(f"# a comment\n{first}\n")
    assert "14 passed, 1 deselected" in run(small, "-m", "not slow")
    assert "1 passed, 14 deselected" in run(small, "-m", "slow")


def test_files_stay_whole_in_every_order(small: Path) -> None:
    def order(*flags: str) -> list[str]:
        return [line for line in run(small, "--collect-only", *flags).splitlines() if "::" in line]

    orders = [order(), order("--order", "one"), order("--order", "two"), order("--order", "two")]
    assert (
        len(orders[0]) == 15 and all(sorted(tests) == sorted(orders[0]) for tests in orders) and orders[2] == orders[3]
    )
    files = [[name for name, _ in itertools.groupby(tests, key=lambda test: test.split("::")[0])] for tests in orders]
    assert all(len(set(names)) == len(names) == 5 for names in files), "a file was taken apart"
    assert files[0] != files[1] != files[2]


def test_the_script_of_ci_is_read_by_its_shell() -> None:
    assert subprocess.run(["bash", "-n", str(HERE.parent / ".ci" / "run")]).returncode == 0
