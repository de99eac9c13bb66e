"""Files of somebody else that would run code: for every command, and for every file that it reads.

``READS`` is the table. A new command has to be in it, with the files that it reads or with none.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_runs import LONG, QUICKSTART, lipdp

from lipdp_lightning.cli import COMMANDS

READ: set[str] = set()  # the files that this process has opened to read them


def _notice(event: str, arguments: tuple[Any, ...]) -> None:
    reads = event == "sqlite3.connect" or (event == "open" and arguments[2] & os.O_ACCMODE != os.O_WRONLY)
    if reads and isinstance(arguments[0], str | bytes | os.PathLike):
        READ.add(os.path.realpath(os.fsdecode(arguments[0])))


sys.addaudithook(_notice)


class Touch:
    """A pickle of this makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


def write_hostile(path: Path, marker: Path) -> None:
    """Writes a file that makes the marker if it is read by the reader of its format that runs code."""
    path.parent.mkdir(parents=True, exist_ok=True)
    touch, kind = Touch(marker), path.suffix
    if kind in (".pt", ".pth", ".ckpt"):
        torch.save({"state_dict": touch, "config": touch, "score": touch}, path)
    elif kind in (".npz", ".npy"):
        objects = np.array([touch], dtype=object)
        np.savez(path, x=objects, y=objects) if kind == ".npz" else np.save(path, objects, allow_pickle=True)
    elif kind == ".yaml":
        path.write_text(f"model: !!python/object/apply:builtins.open ['{marker}', 'w']\n")
    else:
        path.write_bytes(pickle.dumps(touch, protocol=0))


CONFIG = ("--config", QUICKSTART)
STATE = ("run.json", "plan.json", "ledger.json", "progress.json")
RUN_FILES = ("run.json", "checkpoints/last.ckpt")
Words = Callable[[Path], list[Any]]
# of each command: the files that it reads, and the words that make it read them, given the folder that they are in
READS: dict[str, dict[str, Words]] = {
    "fit": {
        **{f"run/{name}": lambda d: ["--run_dir", d / "run", "--wandb", "off", *LONG]
           for name in (*RUN_FILES, "ledger.json", "steps.txt", "csv/metrics.csv")},
        "own.yaml": lambda d: ["--config", d / "own.yaml"],
        "rows.npz": lambda d: [*CONFIG, "--data", "data_modules.NpzArrays", "--data.path", d / "rows.npz", *_SHAPE],
    },
    "test": {f"run/{name}": lambda d: ["--run_dir", d / "run"]
             for name in (*RUN_FILES, "config.yaml", "temperature.json")},
    "predict": {
        **{f"run/{name}": lambda d: ["--run_dir", d / "run", "--output", d / "out.csv"]
           for name in (*RUN_FILES, "config.yaml", "temperature.json")},
        "release.pt": lambda d: ["--release", d / "release.pt", "--output", d / "out.csv"],
    },
    "certify": {
        "own.yaml": lambda d: ["--config", d / "own.yaml"],
        "public.npz": lambda d: [*CONFIG, "--forecast", "--public-inputs", d / "public.npz"],
    },
    "audit": {"own.yaml": lambda d: ["--config", d / "own.yaml", "--out", d / "audit"]},
    "debug": {},  # it runs the script that it is given
    "budget": {},
    "bench": {"results/bench.yaml": lambda d: ["--check", d / "results" / "bench.yaml"]},
    "curves": {"table.csv": lambda d: ["ecdf", "--data", d / "table.csv", "--column", "a", "--range", "0,1",
                                       "--epsilon", "1", "--output", d / "out"]},
    "tune": {
        "own.yaml": lambda d: ["--config", d / "own.yaml", "--out", d / "search"],
        "space.yaml": lambda d: [*CONFIG, "--out", d / "search", "--space", d / "space.yaml"],
        "search/study.sqlite": lambda d: [*CONFIG, "--out", d / "search", "--trials", "1"],
    },
    "reproduce": {},  # what is in its folder is written anew
    "submit": {
        "own.yaml": lambda d: ["--config", d / "own.yaml", "--dry-run"],
        "site.yaml": lambda d: [*CONFIG, "--site", d / "site.yaml", "--dry-run"],
    },
    "export": {f"run/{name}": lambda d: ["--run_dir", d / "run", "--output", d / "out.pt"]
               for name in (*RUN_FILES, "plan.json", "config.yaml", "temperature.json", "privacy_report.json")},
    "compare": {f"run/{name}": lambda d: [d / "run", "--output", d / "out.html"]
                for name in ("privacy_report.json", "config.yaml", *STATE)},
    "status": {f"run/{name}": lambda d: [d]
               for name in ("privacy_report.json", *STATE)},
    "report": {"run/privacy_report.json": lambda d: ["--run_dir", d / "run", "--output", d / "out"]},
    "configs": {},
    "doctor": {},
    "init": {"table.csv": lambda d: [d / "table.csv", "--label", "a", "--rows", "100", "--output", d / "own.yaml"]},
}  # fmt: skip
_SHAPE = ("--data.task", "classification", "--data.low", "0", "--data.high", "1",
          "--data.input_shape", "[2]", "--data.declared_size", "1000", "--data.num_classes", "2")  # fmt: skip


def test_every_command_says_what_it_reads() -> None:
    assert set(READS) == set(COMMANDS)


@pytest.mark.parametrize(("command", "name"), [(command, name) for command, files in READS.items() for name in files])
def test_a_hostile_file_runs_nothing(stopped: Path, tmp_path: Path, command: str, name: str) -> None:
    folder, marker = tmp_path / "of somebody", tmp_path / "ran"
    shutil.copytree(stopped, folder / "run")
    write_hostile(folder / name, marker)
    READ.clear()
    outcome = lipdp(command, *READS[command][name](folder))
    assert not marker.exists(), "code from the file ran"
    assert os.path.realpath(folder / name) in READ, f"the file was not read: {outcome.err}"
    assert outcome.code in (0, 1, 2) and "Traceback" not in outcome.err + outcome.out


@pytest.mark.parametrize("command", [c for c, files in READS.items() if any(n.startswith("run/") for n in files)])
def test_no_other_file_of_a_run_is_read(stopped: Path, tmp_path: Path, command: str) -> None:
    folder = tmp_path.resolve()
    shutil.copytree(stopped, folder / "run")
    READ.clear()
    words = next(words for name, words in READS[command].items() if name.startswith("run/"))
    before = {str(file) for file in (folder / "run").rglob("*") if file.is_file()}
    outcome = lipdp(command, *words(folder))
    assert outcome.code == 0, outcome.err
    assert {os.path.relpath(path, folder) for path in READ & before} <= set(READS[command])


@pytest.mark.parametrize("name", ["a.pt", "a.npz", "a.npy", "a.yaml", "a.json"])
def test_the_files_do_run_code_where_they_may(tmp_path: Path, name: str) -> None:
    import yaml

    marker = tmp_path / "ran"
    write_hostile(tmp_path / name, marker)
    readers: dict[str, Callable[[Path], Any]] = {
        ".pt": lambda path: torch.load(path, weights_only=False),
        ".npz": lambda path: np.load(path, allow_pickle=True)["x"],
        ".npy": lambda path: np.load(path, allow_pickle=True),
        ".yaml": lambda path: yaml.unsafe_load(path.read_text()), ".json": lambda path: pickle.loads(path.read_bytes()),
    }  # fmt: skip
    readers[Path(name).suffix](tmp_path / name)
    assert marker.exists()
