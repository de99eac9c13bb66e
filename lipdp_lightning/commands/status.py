"""``lipdp status``: every run below a folder with its state, step, epsilon and accuracy."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..bound_text import upper_text
from ..report.formats import is_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", default="runs", help="folder of run directories (default: runs)")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. HINT: lipdp status runs")
    rows = [describe(file.parent) for file in sorted(folder.rglob("run.json"))]
    if args.json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return 0
    if not rows:
        sys.stdout.write(f"no runs in {folder}\n")
        return 0
    from ..report.tables import render_table

    headers = ("run", "state", "step", "planned", "epsilon", "delta", "metric", "value")
    right = [False, False, True, True, True, True, False, True]
    cells = [tuple(_cell(row, header) for header in headers) for row in rows]
    sys.stdout.write(render_table(headers, cells, right=right) + "\n")
    return 0


def _cell(row: dict[str, Any], header: str) -> Any:
    """The cost is rounded up: an epsilon or a delta must not be printed smaller than it is."""
    value = row[header]
    return upper_text(value) if header in ("epsilon", "delta") and is_number(value) else value


def describe(directory: Path) -> dict[str, Any]:
    """One run; files that are missing or cannot be read leave their columns empty."""
    record, plan = _read(directory / "run.json"), _read(directory / "plan.json")
    report, ledger = _read(directory / "privacy_report.json"), _read(directory / "ledger.json")
    branches, state = ledger.get("branches", []), record.get("status", "unreadable")
    reached = _released(directory) if state == "running" else max((b.get("reached", 0) for b in branches), default=None)
    name, value = _metric(report)
    return {
        "run": str(directory),
        "state": "running or interrupted" if state == "running" else state,
        "step": record.get("steps", reached),
        "planned": plan.get("steps"),
        "epsilon": report.get("epsilon"),
        "delta": plan.get("delta"),
        "metric": name,
        "value": value,
    }


def _released(directory: Path) -> int | None:
    """Steps that a running run has taken: the ledger reserves more."""
    try:
        lines = (directory / "steps.txt").read_text(errors="replace").splitlines()
    except OSError:
        return None
    words = [line.split() for line in lines if not line.startswith("diverged")]
    steps = [found[1] for found in words if len(found) == 3]
    return max((int(step) + 1 for step in steps if step.isdigit()), default=0)


def _metric(report: dict[str, Any]) -> tuple[str | None, float | None]:
    metrics = report.get("metrics", {})
    for name in ("test/accuracy", "validation/accuracy", "test/mae", "validation/mae"):
        if name in metrics:
            return name, metrics[name]
    return None, None


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
