"""Every command that a page shows is run, or is in a table that says what it needs."""

from __future__ import annotations

import csv
import functools
import importlib
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_docs import PAGES, ROOT, blocks, name_of

from lipdp_lightning.cli import main
from lipdp_lightning.studies.debugging import opacus_script

SLURM = ROOT / "slurm" / "README.md"
INLINE = re.compile(r"`((?:lipdp|python -m lipdp_lightning)[^`\n]*)`")
# what makes a command longer than a test may be, and the same command in short
SHORTER = (
    (r"--trials \d+", "--trials 2"),
    (r"--privacy\.epochs (60|10)", "--privacy.epochs 2"),
    (r"--attack \d+", "--attack 1"),
    (r"--turns 5", "--turns 1 --steps 1 --views 2"),
    (r"--suite full", "--suite quick"),
    (r"debug --script \S+", r"\g<0> --largest-batch 32 --models 3 --bounds 6"),
    (r"(bench --model) \S+ --batch-size 256", r"\1 mlp-512x4 --batch-size 8 --repeats 1 --contender joint"),
    (r"studies\.exact_cost$", "studies.exact_cost --rows 4 --repeats 1"),
    (r"(scaling_comparison --output \S+)", r"\1 --networks mlp --scalings joint --epochs 0.05 --seeds 1"),
    (r"(layer_signal --config \S+) .*", r"\1 --examples 8 --privacy.epochs null --privacy.steps 1"),
)
# commands that are not run here, with what they need
ELSEWHERE = {
    r"cifar10|fashion_mnist|studies\.front": "images that do not ship with a package, and hours",
    r"--device cuda|doctor": "a GPU, or a Slurm that is installed whole or not at all; tests/doctor runs it",
    r"reproduce (?!--list)": "hours; tests/studies/reproduce runs the entries in short",
    r"bench (--full|--check|--growth|--certificate|--scaling)|bench$|wrn-16-4": "a quiet machine, and many minutes",
    r"trainer\.devices 2": "processes of its own; tests/distributed runs them",
    r"-m pytest": "to be run beside the tests that it names",
    r"…|<|\bDIR\b|--levels L|certify --attack|submit --nodes": "what is left out where it is named in passing",
}


def shown() -> list[Any]:
    """Every command of a page: each line of a shell block, and code in the text."""
    found = []
    for page in (*PAGES, SLURM):
        if page.name == "CHANGELOG.md":
            continue
        lines = [
            (start + index, line)
            for start, text in blocks(page, "bash")
            for index, line in enumerate(text.replace("\\\n", " ").splitlines())
        ]
        text = page.read_text(encoding="utf-8")
        lines += [
            (text.count("\n", 0, match.start()) + 1, match.group(1))
            for match in INLINE.finditer(text)
            if match.group(1).startswith("python") or " --" in match.group(1)
        ]
        for line, command in lines:
            words = command.split()
            if words[:1] == ["lipdp"] or words[:2] == ["python", "-m"]:
                found.append(pytest.param(name_of(page), command, id=f"{name_of(page)}:{line}:{command[:50]}"))
    return found


def short(command: str) -> str:
    for pattern, replacement in SHORTER:
        command = re.sub(pattern, replacement, command)
    return command


def needs(command: str) -> str | None:
    return next((why for pattern, why in ELSEWHERE.items() if re.search(pattern, command)), None)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder for each page, with the configurations and the tables that pages name."""
    return functools.cache(lambda page: prepared(tmp_path_factory.mktemp("documented")))


def prepared(folder: Path) -> Path:
    (folder / "configs").symlink_to(ROOT / "configs")
    generator = np.random.default_rng(0)
    table = {
        "age": generator.integers(18, 90, 200), "income": generator.integers(0, 90_000, 200),
        "score": generator.random(200).round(3), "probability": generator.random(200).round(3),
        "outcome": generator.choice(["yes", "no"], 200), "bought": generator.choice(["yes", "no"], 200),
        "patient": np.arange(200) // 2,
    }  # fmt: skip
    for name in ("table.csv", "people.csv", "scores.csv", "visits.csv"):
        with open(folder / name, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(table)
            writer.writerows(zip(*table.values(), strict=True))
    (folder / "bank.csv").write_text("age,y\n30,no\n")  # of which the names alone are read
    shutil.copy(opacus_script.__file__, folder / "my_training.py")
    return folder


def run_dirs(command: str) -> list[str]:
    """Returns the run directories that a command names, and one of the folder of runs that it reads."""
    folders = re.findall(r"lipdp (?:status|compare) (runs)(?!\S)", command)
    return [*re.findall(r"--run_dir (\S+)", command), *(f"{folder}/first" for folder in folders)]


def run(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = shlex.split(command, comments=True)
    try:
        if words[0] == "lipdp":
            return main(words[1:])
        monkeypatch.setattr(sys, "argv", words[2:])
        return int(importlib.import_module(words[2]).main() or 0)
    except SystemExit as ended:  # after --help
        return int(ended.code or 0)


def test_the_commands_of_pages_are_found() -> None:
    commands = [param.values[1] for param in shown()]
    assert len(commands) > 50 and any("studies.multiplicity" in c for c in commands)
    assert {c.split()[1] for c in commands if c.startswith("lipdp")} >= {
        "fit",
        "predict",
        "compare",
        "submit",
        "export",
    }


def test_no_reason_is_left_over() -> None:
    commands = [param.values[1] for param in shown()]
    assert [pattern for pattern in ELSEWHERE if not any(re.search(pattern, command) for command in commands)] == []


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), shown())
def test_a_documented_command_runs(
    page: str, command: str, places: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if (reason := needs(command)) is not None:
        pytest.skip(f"needs {reason}")
    if re.search(r"--config (?!configs/)\S+|--data (?!\S+\.csv)", command) and not command.startswith("python"):
        pytest.skip("needs a file that its page describes; tests of the page write it")
    place = places(page)
    made = [directory for directory in run_dirs(command) if not (place / directory).exists()]
    if command.startswith("lipdp fit") and run_dirs(command) and not made:
        pytest.skip("was run for a command that reads its directory")
    for directory in made if command.split()[1] not in ("fit", "submit") else []:
        fit = f"lipdp fit --config configs/quickstart.yaml --privacy.epochs 1 --wandb off --run_dir {directory}"
        assert run(fit, place, monkeypatch) == 0
    refuted = "audit" in command and "algorithm8" in command  # which is what the page says
    assert run(short(command), place, monkeypatch) == (1 if refuted else 0)
