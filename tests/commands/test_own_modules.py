"""Modules of the current folder are importable by class_path, from a program that lies elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_runs import lipdp

from lipdp_lightning.experiment.foreign_code import check_named_code
from lipdp_lightning.own_folders import importable_folder

ROOT = Path(__file__).parents[2]

MODULE = """
import torch
from lipdp_lightning.data_modules import PrivateData, PrivateDataModule

DECLARED = {"rows": 200, "shape": 4, "low": 0, "high": 1, "label": {"classes": 3}}


def rows():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(200, 4, generator=generator), torch.arange(200) % 3


def study() -> PrivateDataModule:
    return PrivateData.of(rows(), DECLARED)


class Mine(PrivateDataModule):
    input_shape, task, num_classes, declared_size, heldout_share = (4,), "classification", 3, 200, {share}

    def load_train(self):
        return rows()
"""
CONFIG = """
model:
  network: {class_path: my_net.Net}
data: {class_path: my_data.CLASS}
privacy: {noise_multiplier: 4.0, delta: 1.0e-4, steps: 2, batch_size: 40, accountant: rdp, max_norm: null}
trainer: {accelerator: cpu, devices: 1, enable_progress_bar: false}
"""
NET = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 3))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project's folder, and in another one the program, as pip installs it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/lipdp").write_text("from lipdp_lightning.cli import main\nraise SystemExit(main())\n")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "my_data.py").write_text(MODULE.replace("{share}", "0.0"))
    (folder / "my_net.py").write_text(NET)
    # a file that takes the place of an installed package would break every import
    (folder / "torchmetrics.py").write_text("raise RuntimeError('not asked for')\n")
    for name in ("Mine", "study"):
        (folder / f"{name}.yaml").write_text(CONFIG.replace("CLASS", name))
    return folder


def forget() -> None:
    for name in ("my_data", "my_net"):
        sys.modules.pop(name, None)


@pytest.fixture
def inside(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes the project's folder the current one of this process, which has imported none of its modules."""
    monkeypatch.chdir(project)
    forget()
    yield project
    forget()


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the program from the folder, in a process that has to import the installed packages too."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "LIPDP_RUN"))}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(folder.parent / "bin/lipdp"), *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_fit_takes_a_class_and_a_function_of_the_folder(project: Path) -> None:
    done = run(project, "fit", "--config", "study.yaml", "--run_dir", "a", "--wandb", "off")
    assert done.returncode == 0, done.stderr
    assert "validation/accuracy" in done.stdout and "no row is held out" not in done.stdout


def test_the_configuration_that_a_run_keeps_names_them_as_well(inside: Path) -> None:
    assert lipdp("fit", "--config", "study.yaml", "--run_dir", "a", "--wandb", "off").code == 0
    forget()
    again = lipdp("fit", "--config", "a/config.yaml", "--run_dir", "b", "--wandb", "off")
    assert again.code == 0, again.err


def test_a_run_without_held_out_rows_says_so_before_it_spends(inside: Path) -> None:
    done = lipdp("fit", "--config", "Mine.yaml", "--run_dir", "a", "--wandb", "off")
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if "no row is held out" in line]
    assert len(lines) == 1 and lines[0].startswith("metrics ")
    assert done.out.index("no row is held out") < done.out.index("Certificate per layer")
    assert "validation/accuracy" not in done.out


@pytest.mark.parametrize(
    "command",
    [["certify"], ["submit", "--dry-run", "--anyway"], pytest.param(["audit", "--out", "out"], marks=pytest.mark.slow)],
)
def test_the_other_commands_find_it_too(inside: Path, command: list[str]) -> None:
    done = lipdp(*command, "--config", "study.yaml")
    assert done.code == 0, done.err


def test_the_folder_comes_last_and_leaves_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["first"])
    with importable_folder():
        assert sys.path == ["first", str(tmp_path)]
    assert sys.path == ["first"]
    monkeypatch.setattr(sys, "path", [str(tmp_path), "first"])
    with importable_folder():
        assert sys.path == [str(tmp_path), "first"]


def test_a_copied_run_that_names_a_module_of_the_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is on the path when a stored configuration is judged, so that what it could import is foreign."""
    (tmp_path / "lies_here.py").write_text("raise RuntimeError('run')\n")
    monkeypatch.chdir(tmp_path)
    text = "model: {network: {class_path: lies_here.Net}}\n"
    with importable_folder(), pytest.raises(ValueError, match=r"names code outside this package: lies_here\.Net"):
        check_named_code(text, "config.yaml")
    check_named_code(text, "config.yaml")  # what cannot be imported runs nothing
