"""Implements ``lipdp report``: writes a run's reports again, from its privacy_report.json."""

from __future__ import annotations

import argparse
import os

from ..files import FileNotWritten
from ..report.show import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run_dir", "--run-dir", required=True, help="directory of a run")
    parser.add_argument("--output", default=None, help="directory for the reports (default: the run directory)")


def run(args: argparse.Namespace) -> int:
    from ..files import read_json
    from ..report.model import RunFacts
    from ..report.write import JSON_NAME, write_report
    from ..training.run_directory import RunDirectory

    directory = RunDirectory(args.run_dir)
    source = directory.path / JSON_NAME
    if not os.path.lexists(source):
        try:
            directory.require()
        except ValueError as error:
            raise ValueError(f"there is no {source}: {error}") from error
        raise ValueError(f"there is no {source}. HINT: lipdp fit writes it when training ends or is stopped.")
    directory.check_owner()
    try:
        facts = RunFacts.from_dict(read_json(source))
        paths = write_report(args.output if args.output is not None else args.run_dir, facts)
    except FileNotWritten:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, OSError) as error:
        raise ValueError(f"{source} cannot be read: {error}. HINT: restore it from a backup.") from error
    for path in paths.values():
        show(f"{path}\n")
    return 0
