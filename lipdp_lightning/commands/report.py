"""``lipdp report``: write a run's reports again, from its privacy_report.json."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run_dir", "--run-dir", required=True, help="directory of a run")
    parser.add_argument("--output", default=None, help="where to write them instead of the run directory")


def run(args: argparse.Namespace) -> int:
    from ..report.model import RunFacts
    from ..report.write import JSON_NAME, write_report

    source = Path(args.run_dir) / JSON_NAME
    if not source.is_file():
        raise ValueError(f"there is no {source}. HINT: lipdp fit writes it when training ends or is stopped.")
    try:
        content = json.loads(source.read_text())
        facts = RunFacts.from_dict(content)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{source} cannot be read: {error}. HINT: restore it from a backup.") from error
    paths = write_report(args.output if args.output is not None else args.run_dir, facts)
    for path in paths.values():
        sys.stdout.write(f"{path}\n")
    return 0
