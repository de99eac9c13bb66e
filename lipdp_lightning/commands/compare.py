"""Implements ``lipdp compare``: one page and one table for several runs."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import read_bytes
from ..report.show import show
from ..run_names import CONFIG_FILE, REPORT_FILE
from .status import describe, run_directories

if TYPE_CHECKING:
    from ..report.comparison import ComparedRun
    from ..report.model import RunFacts

LARGEST_CONFIG = 1 << 20  # bytes
LARGEST_REPORT = 1 << 26
LONGEST_CELL = 48  # characters on the terminal; the page and --json show all of them
MOST_SETTINGS = 2000  # an alias of YAML can stand for any number of them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", help="run directories, or folders of them")
    parser.add_argument("--output", default="compare.html", help="page to write (default: compare.html)")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    from ..report.atomic import write_atomically
    from ..report.comparison import Comparison
    from ..report.figure_style import shorten
    from ..report.tables import render_table

    folders = [Path(name) for name in args.runs]
    problems = [f"{folder} is not a folder. HINT: lipdp compare runs/*" for folder in folders if folder.is_file()]
    problems += [
        f"{folder} does not exist. HINT: `lipdp status` lists the runs of a folder"
        for folder in folders
        if not folder.exists()
    ]
    if Path(args.output).suffix != ".html":
        problems.append(f"--output {args.output} is not an HTML page. HINT: use --output compare.html")
    directories = list(dict.fromkeys(place for folder in folders for place in run_directories(folder)))
    if not problems and not directories:
        problems.append(f"there is no run in {', '.join(args.runs)}. HINT: name what lipdp fit has written.")
    if problems:
        raise ValueError("\n".join(problems))
    above = Path(os.path.commonpath([directory.absolute().parent for directory in directories]))
    found = [read_run(directory, str(directory.absolute().relative_to(above))) for directory in directories]
    compared = sorted(found, key=lambda each: (_epsilon(each), each.name))
    comparison = Comparison(tuple(compared))
    write_atomically(args.output, comparison.page())
    if args.json:
        tables = {name: getattr(comparison, name)() for name in ("results", "settings", "costs")}
        content = {n: [dict(zip(t.headers, row, strict=True)) for row in t.rows] for n, t in tables.items()}
        sys.stdout.write(json.dumps({**content, "cautions": comparison.cautions()}, indent=1) + "\n")
        return 0
    for title, table in (("Results", comparison.results()), ("Settings that differ", comparison.settings())):
        if table:
            rows = [[shorten(cell, LONGEST_CELL) for cell in row] for row in table.rows]
            show(render_table(table.headers, rows, title=title, right=table.numeric) + "\n\n")
    show("".join(f"caution: {text}\n" for text in comparison.cautions()) + f"page: {args.output}\n")
    return 0


def _epsilon(run: ComparedRun) -> float:
    return math.inf if run.facts is None or run.facts.epsilon is None else run.facts.epsilon


def read_run(directory: Path, name: str) -> ComparedRun:
    """Returns a run to compare under a name; a file that cannot be read leaves its columns empty."""
    from ..report.comparison import ComparedRun, Comparison
    from ..report.model import RunFacts

    row, settings = describe(directory), read_settings(directory)

    def compared(facts: RunFacts | None) -> ComparedRun:
        return ComparedRun(name, str(row["state"]), facts, settings, row["seconds"])

    try:
        facts = RunFacts.from_dict(json.loads(read_bytes(directory / REPORT_FILE, LARGEST_REPORT))).public()
        alone = Comparison((compared(facts),))
        alone.results(), alone.costs(), alone.cautions()  # a report whose values have other types fails here
    except (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError):
        return compared(None)
    return compared(facts)


def read_settings(directory: Path) -> dict[str, Any]:
    """Returns a run's configuration by dotted key, or nothing if it cannot be read."""
    import yaml

    try:
        content = yaml.safe_load(read_bytes(directory / CONFIG_FILE, LARGEST_CONFIG).decode("utf-8"))
        settings: dict[str, Any] = {}
        for key, value in _leaves(content, ""):
            settings[key] = value
            if len(settings) > MOST_SETTINGS:
                raise ValueError("it has too many settings")
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return settings


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{place}.{key}".lstrip("."))
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{place}.{index}")
    elif place:  # a loop by Engine has no configuration
        yield place, value if value is None or isinstance(value, bool | int | float) else str(value)
