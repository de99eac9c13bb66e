"""Malformed input to every command: exit code 2, a line with a hint for each problem, and nothing left behind."""

from __future__ import annotations

import importlib
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bad_configs import CLASSES, COMMANDS, FILES, KEYS, MODULES, NUMBERS, OUTPUTS, SLOW, TABLES, TRAINER
from command_runs import ROOT, SMALL, Outcome, environment, lipdp

SHORT = [*SMALL, "--privacy.steps", "2", "--trainer.enable_progress_bar", "false"]
LONGEST = 510
OPTIONS = NUMBERS | TRAINER | OUTPUTS | CLASSES | KEYS


def _cases() -> list[Any]:
    """All of them; of the values of one key two are fast."""
    cases, seen = [], Counter[tuple[str, ...]]()
    for words in OPTIONS:
        many = words in NUMBERS or words in TRAINER
        seen[words[:-1]] += many
        marks = [pytest.mark.slow] if seen[words[:-1]] > 2 else []
        cases.append(pytest.param(words, marks=marks, id=" ".join(words)[:70]))
    return cases


_COMMANDS = [*COMMANDS, *(pytest.param(words, marks=pytest.mark.slow) for words in SLOW)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with modules that cannot be used on the path."""
    for name in MODULES:
        sys.modules.pop(Path(name).stem, None)
    modules, work = tmp_path / "modules", tmp_path / "work"
    modules.mkdir()
    work.mkdir()
    for name, text in MODULES.items():
        (modules / name).write_text(text)
    monkeypatch.syspath_prepend(str(modules))
    importlib.invalidate_caches()
    monkeypatch.chdir(work)
    monkeypatch.delenv("LIPDP_TRACEBACK", raising=False)
    return work


def check(outcome: Outcome, expected: str = "") -> None:
    """The form of every refusal."""
    errors = outcome.err
    assert outcome.code == 2, (outcome.code, errors)
    assert "HINT" in errors and expected in errors, errors
    assert not re.search(r"Traceback|Namespace\(|<class '|NestedArg|object at 0x", errors), errors
    lines = [line for line in errors.splitlines() if line.strip() and not line.startswith("warning: ")]
    assert sum(line.startswith("lipdp") for line in lines) == 1, errors
    assert all(len(line) <= LONGEST for line in lines) and len(lines) <= 8, errors
    headed = re.match(r"lipdp \w+: .* \d+ problem(\(s\))?:$", lines[0])
    assert all("HINT" in line for line in lines[bool(headed) :]), errors


def left_behind(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("words", _cases())
def test_options_of_fit(words: tuple[str, ...], folder: Path) -> None:
    mode = () if "--wandb" in words else ("--wandb", "offline")
    check(lipdp("fit", "--run_dir", "run", *mode, *SHORT, *words), OPTIONS[words])
    assert left_behind(folder) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
def test_files_of_configurations(name: str, folder: Path) -> None:
    content, expected = FILES[name]
    (folder / "config.yaml").write_bytes(content)
    check(lipdp("fit", "--run_dir", "run", "--wandb", "offline", "--config", "config.yaml"), expected)
    assert left_behind(folder) == ["config.yaml"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("words", _COMMANDS, ids=lambda words: " ".join(words)[-70:])
def test_other_commands(words: tuple[str, ...], folder: Path) -> None:
    (folder / "rows.csv").write_text("v,y\n" + "".join(f"{i / 100},{i % 2}\n" for i in range(100)))
    check(lipdp(*words))
    assert left_behind(folder) == ["rows.csv"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TABLES)
def test_tables_of_curves(name: str, folder: Path) -> None:
    (folder / "rows.csv").write_bytes(TABLES[name])
    words = ("--data", "rows.csv", "--column", "v", "--epsilon", "1", "--range=0,1", "--output", "out")
    check(lipdp("curves", "ecdf", *words))
    assert left_behind(folder) == ["rows.csv"]


def test_no_command_shows_the_commands() -> None:
    outcome = lipdp()
    assert outcome.code == 2 and "commands:" in outcome.out


def test_a_traceback_is_shown_to_those_who_ask_for_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIPDP_TRACEBACK", "1")
    with pytest.raises(ValueError, match=r"bad_syntax.Net cannot be imported"):
        lipdp("fit", *SHORT, "--model.network", "bad_syntax.Net")


# ---- memory

# the words of a run, and what the guard against it says: another limit would not name the number
LARGE = {
    "steps": (["--privacy.steps", "1000000000000"], "steps 1000000000000 is more than any training takes"),
    "epochs": (["--privacy.steps", "null", "--privacy.epochs", "1e12"], "steps 5617187500000 is more than any"),
    "a tiny batch": (
        ["--privacy.steps", "null", "--privacy.epochs", "1", "--privacy.batch_size", "1e-9"],
        "expected_batch_size 1e-09 is so small that steps would draw nothing",
    ),
    "calibration": (
        ["--privacy.noise_multiplier", "null", "--privacy.epsilon", "3", "--privacy.steps", "1000000000000"],
        "steps 1000000000000 is more than any training takes",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE)
def test_numbers_that_no_memory_holds(case: str, tmp_path: Path) -> None:
    """The guard is `size_problems` of accounting/events.py."""
    words, expected = LARGE[case]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (120, 120))

    code = "import sys; from lipdp_lightning.cli import main; sys.exit(main())"
    words = ["fit", "--run_dir", "run", "--wandb", "off", *SHORT, *words]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=tmp_path, preexec_fn=limit,
        env=environment() | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    check(Outcome(done.returncode, done.stdout, done.stderr), expected)
    assert left_behind(tmp_path) == []
