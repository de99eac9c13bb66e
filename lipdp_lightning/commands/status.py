"""Implements ``lipdp status``: lists every run below a folder with its state, step, epsilon and accuracy."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TypeGuard

from ..alive import is_alive
from ..bound_text import upper_text
from ..files import read_bytes, read_json
from ..report.formats import finite, format_duration, is_number
from ..report.majority import Majority
from ..report.show import show
from ..run_names import FORMAT, LEDGER_FILE, PLAN_FILE, PROGRESS_FILE, REPORT_FILE, RUN_FILE, STEPS_FILE

SILENT = 900.0  # seconds without a sign of life, after which a run on another machine does not count as running
_COSTS = ("epsilon", "so far", "delta")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", default="runs", help="folder of run directories (default: runs)")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. HINT: lipdp status runs")
    rows = [describe(directory) for directory in run_directories(folder)]
    if args.json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return 0
    if not rows:
        show(f"no runs in {folder}\n")
        return 0
    from ..report.tables import render_table

    headers = ["run", "state", "step", "planned", "epsilon", "so far", "delta", "metric", "value", "majority", "AUROC"]
    if any(row["steps/s"] is not None for row in rows):
        headers[4:4] = ["steps/s", "left"]
    right = [header not in ("run", "state", "metric") for header in headers]
    cells = [tuple(_cell(row, header) for header in headers) for row in rows]
    show(render_table(headers, cells, right=right) + "\n")
    for row in rows:
        if row["caution"] is not None:
            show(f"{row['run']}: {row['caution']}\n")
    return 0


def _cell(row: dict[str, Any], header: str) -> Any:
    """Rounds the cost up, since an epsilon or a delta must not be printed smaller than it is."""
    value = row[header]
    if header == "left":
        return None if value is None else format_duration(value)
    return upper_text(value) if header in _COSTS and is_number(value) else value


def run_directories(folder: Path) -> list[Path]:
    """Returns every directory below a folder that holds a run or its remains; unreadable folders are skipped."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders.sort()
        if {RUN_FILE, LEDGER_FILE, STEPS_FILE} & {*files, *folders}:
            found.append(Path(parent))
    return found


def describe(directory: Path) -> dict[str, Any]:
    """Returns the row of one run; files that are missing or cannot be read leave their columns empty."""
    record, plan = _read(directory / RUN_FILE), _read(directory / PLAN_FILE)
    report, ledger = _read(directory / REPORT_FILE), _read(directory / LEDGER_FILE)
    progress = _read(directory / PROGRESS_FILE)
    state = _state(directory, record)
    branches = ledger.get("branches")
    ends = [b.get("reached") for b in branches if isinstance(b, dict)] if isinstance(branches, list) else []
    reached = max((end for end in ends if _is_count(end)), default=None)
    facts = report
    if state == "running":
        state, reached, facts = _condition(directory, record), _released(directory), progress or report
    name, value = _metric(facts)
    step = record["steps"] if _is_count(record.get("steps")) else reached
    planned = plan["steps"] if _is_count(plan.get("steps")) else None
    rate = finite(facts.get("rate")) if state == "running" else None
    rate = rate if rate is not None and rate > 0 else None
    majority = Majority.of(facts["metrics"], name) if name is not None else None
    return {
        "run": str(directory),
        "state": state,
        "step": step,
        "planned": planned,
        "steps/s": rate,
        "left": None if rate is None or step is None or planned is None else finite(max(0, planned - step) / rate),
        "epsilon": finite(facts.get("epsilon")),
        "so far": finite(facts.get("epsilon_taken")),
        "delta": finite(plan.get("delta")),
        "metric": name,
        "value": value,
        "majority": None if majority is None else majority.rate,
        "balanced accuracy": None if majority is None else majority.balanced_accuracy,
        "AUROC": None if majority is None else majority.auroc,
        "seconds": finite(record.get("seconds")),
        "caution": None if majority is None else majority.caution(),
    }


def _condition(directory: Path, record: dict[str, Any]) -> str:
    """Returns whether a run that has not said how it ended is running."""
    try:
        silence = time.time() - (directory / PROGRESS_FILE).stat().st_mtime
    except OSError:
        silence = 0.0
    silent = f"no step for {silence / 3600:.1f} h" if silence > SILENT else ""
    alive = is_alive(record.get("process"))
    if alive is False:
        return "crashed"
    if alive:
        return f"running, {silent}" if silent else "running"
    return silent or "running or interrupted"


def _state(directory: Path, record: dict[str, Any]) -> str:
    if not os.path.lexists(directory / RUN_FILE):
        return "incomplete"
    state = record.get("status")
    if not isinstance(state, str) or not state.isprintable():
        return "unreadable"
    return state if record.get("format") == FORMAT else f"{state}, of another version"


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 63


def _released(directory: Path) -> int | None:
    """Returns the steps that a running run has taken; the ledger reserves more."""
    try:
        text = read_bytes(directory / STEPS_FILE).decode(errors="replace")
    except (OSError, ValueError):
        return None
    words = [line.split() for line in text.splitlines() if not line.startswith("diverged")]
    steps = [found[1] for found in words if len(found) == 3]
    return max((int(step) + 1 for step in steps if step.isdecimal() and len(step) < 19), default=0)


def _metric(report: dict[str, Any]) -> tuple[str | None, float | None]:
    from ..report.words import likeliest_metric, metric_names

    metrics, declared = report.get("metrics"), report.get("primary_metric")
    if not isinstance(metrics, dict):
        return None, None
    name = declared if isinstance(declared, str) and declared in metrics else likeliest_metric(metric_names([metrics]))
    return name, None if name is None else finite(metrics[name])


def _read(file: Path) -> dict[str, Any]:
    try:
        content = read_json(file)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
