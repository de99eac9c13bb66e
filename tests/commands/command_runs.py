"""Runs of the real command, in this process or in one of their own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lipdp_lightning.cli import main

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
# Digits, twelve steps of a plan that one step of another accountant takes no time for
SMALL = [
    "--config", QUICKSTART, "--privacy.epsilon", "null", "--privacy.noise_multiplier", "1.5",
    "--privacy.epochs", "null", "--privacy.steps", "12", "--privacy.accountant", "pld",
]  # fmt: skip
# with budget for a second branch
LONG = [*SMALL, "--privacy.steps", "120", "--trainer.max_steps", "12"]


@dataclass
class Outcome:
    code: int
    out: str
    err: str


def environment() -> dict[str, str]:
    chosen = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    return chosen | {"OMP_NUM_THREADS": "1", "WANDB_SILENT": "true"}


def lipdp(*arguments: str | Path) -> Outcome:
    """The command in this process; its exit code and what it wrote."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
    return Outcome(code, out.getvalue(), err.getvalue())


def fit(run_dir: Path, *options: str | Path, wandb: str = "off") -> Outcome:
    return lipdp("fit", "--run_dir", run_dir, "--wandb", wandb, *options)


def lipdp_process(*arguments: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
    """The installed command, as a process of its own."""
    script = Path(sys.executable).with_name("lipdp")
    return subprocess.Popen(
        [str(script), *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
        env=environment(),
    )  # fmt: skip


def snapshot(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, with its content."""
    return {str(f.relative_to(directory)): f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file()}
