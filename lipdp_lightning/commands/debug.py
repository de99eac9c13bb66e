"""Implements ``lipdp debug``: runs the three tests of paper 002 on a training function of the user's own script."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..audit.blackbox.black_box import Implementation, Optimizer
    from ..audit.findings import Finding

RATES: dict[Optimizer, float] = {"sgd": 0.1, "adam": 0.01}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--script", required=True, metavar="FILE.py:FUNCTION", help="the training function to be tested"
    )
    parser.add_argument(
        "--optimizer", choices=tuple(RATES), action="append", help="one to test; may be repeated (default: sgd)"
    )
    parser.add_argument(
        "--largest-batch", type=int, default=100, metavar="B", help="most rows of a batch (default 100)"
    )
    parser.add_argument("--models", type=int, default=5, metavar="M", help="models for each bound (default 5)")
    parser.add_argument("--bounds", type=int, default=10, metavar="N", help="bounds of the third test (default 10)")
    parser.add_argument("--out", metavar="DIR", help="directory for debug.json and the plots")


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 if a test finds a fault."""
    from ..audit.blackbox.user_script import script_implementation
    from ..report.show import show
    from ..report.tables import render_table

    if args.largest_batch < 8 or args.models < 2 or args.bounds < 3:
        raise ValueError(
            "too few measurements for a slope. HINT: use --largest-batch 8, --models 2, --bounds 3 or more."
        )
    implementation = script_implementation(args.script)
    findings: list[Finding] = []
    for optimizer in args.optimizer or ["sgd"]:
        findings += three_tests(implementation, optimizer, args.largest_batch, args.models, args.bounds)
    rows = [[f.name, f.verdict, f.question] for f in findings]
    lines = [render_table(["test", "verdict", "question"], rows, right=[False] * 3), ""]
    lines += [f"{f.name}: {f.statement}" for f in findings]
    broken = [f.name for f in findings if f.violated]
    lines.append(
        f"Faults: {', '.join(broken)}." if broken else
        "No fault was found. These tests find common mistakes; they prove no epsilon."
    )  # fmt: skip
    show("\n".join(lines) + "\n", sys.stdout)
    if args.out:
        _write(Path(args.out), findings)
    return 1 if broken else 0


def three_tests(
    implementation: Implementation, optimizer: Optimizer, largest_batch: int = 100, models: int = 5, bounds: int = 10
) -> list[Finding]:
    """Returns the findings on whether there is a bound, whether it holds for each example, and whether noise follows
    it."""
    from ..audit.blackbox import bound_finding, calibration_finding, per_example_finding
    from ..audit.blackbox.black_box import HyperParameters
    from ..audit.blackbox.bound_tests import SIZES

    hyper = HyperParameters(1.0, learning_rate=RATES[optimizer], optimizer=optimizer)
    sizes = [size for size in SIZES if size <= largest_batch]
    return [
        bound_finding(implementation, hyper),
        per_example_finding(implementation, hyper, sizes),
        calibration_finding(implementation, hyper, 1e-4, models=models, values=bounds),
    ]


def _write(directory: Path, findings: Sequence[Finding]) -> None:
    """Writes debug.json, and one plot for each finding; all are rendered before any is written."""
    import json

    from ..audit.finding_plots import draw
    from ..files import write_bytes_atomically
    from ..report.atomic import write_atomically
    from ..report.figure_style import figure_to_png

    text = json.dumps([f.as_dict() for f in findings], indent=1, allow_nan=False) + "\n"
    plots = {
        f"{f.name.replace(', ', '-').replace(' ', '-')}.png": figure_to_png(draw(p)) for f in findings for p in f.plots
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in plots.items():
        write_bytes_atomically(directory / name, content)
    write_atomically(directory / "debug.json", text)
