"""Implements ``lipdp reproduce``: reproduces the papers' tables and figures, with certified epsilons."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ..report.show import show

if TYPE_CHECKING:
    from ..studies.reproduce.catalogue import Listed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="entries to reproduce; --list shows the names")
    parser.add_argument(
        "--list", action="store_true", help="list the entries, and for each paper its items with their states"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="directory for the results (default runs/reproduce, or runs/reproduce-quick)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="run fewer and smaller cells, as a check and not as the experiment"
    )
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="number of repetitions of every cell (default: the entry's)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="J", help="worker processes, one thread each (default 1)"
    )
    parser.add_argument("--into", metavar="PAGE", help="a page whose quotation of the entries is written anew")


def run(args: argparse.Namespace) -> int:
    """Returns 0 if every cell finished, 1 if one failed, and 130 after Ctrl-C; finished cells are always kept."""
    from ..studies.reproduce.catalogue import catalogue, find
    from ..studies.reproduce.entry_run import check_data

    if args.list:
        from ..studies.reproduce.paper_items import listing, paper_items

        _list(catalogue())
        _tell("\n".join(listing(paper_items())))
        return 0
    problems = []
    if not args.names:
        problems.append("no NAME was given.")
    problems += [f"--{name} {value} is below 1." for name, value in _counts(args) if value < 1]
    if problems:
        raise ValueError(" ".join(problems) + " HINT: `lipdp reproduce --list` shows the names, --help the options.")
    chosen = [find(name) for name in args.names]
    check_data([listed.entry for listed in chosen])
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _make(chosen, args)
    finally:
        signal.signal(signal.SIGTERM, before)


def _make(chosen: Sequence[Listed], args: argparse.Namespace) -> int:
    from ..studies.reproduce.entry import Options
    from ..studies.reproduce.entry_run import reproduce

    failed = 0
    out = args.out or f"runs/reproduce{'-quick' * args.quick}"
    into = Path(args.into) if args.into else None
    for listed in chosen:
        try:
            made = reproduce(listed, out, Options(args.quick, args.seeds), args.jobs, _tell, into)
        except KeyboardInterrupt:
            sys.stderr.write(f"lipdp reproduce: interrupted. HINT: the same command continues {listed.entry.name}.\n")
            return 130
        _tell(str(made.page))
        for row in made.failed:
            show(f"lipdp reproduce: a cell of {listed.entry.name} failed: {row['error']}\n", sys.stderr)
        failed += len(made.failed)
    if failed:
        sys.stderr.write(f"lipdp reproduce: {failed} failed. HINT: {out}/NAME.log has the details.\n")
    return 1 if failed else 0


def _counts(args: argparse.Namespace) -> list[tuple[str, int]]:
    given = [("seeds", args.seeds), ("jobs", args.jobs)]
    return [(name, value) for name, value in given if value is not None]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _tell(line: str) -> None:
    show(f"{line}\n")


def _list(known: Mapping[str, Listed]) -> None:
    rows = [("name", "expected time", "source")]
    rows += [(name, listed.entry.expected_time, listed.entry.source) for name, listed in known.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        _tell("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
