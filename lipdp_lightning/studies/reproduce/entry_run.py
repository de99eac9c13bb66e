"""Runs one entry from its cells to its page; an interrupted run continues where it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lipdp_lightning import __version__
from lipdp_lightning.report.atomic import write_atomically
from lipdp_lightning.studies.reproduce.catalogue import Listed
from lipdp_lightning.studies.reproduce.entry import Cell, Entry, Options, Row, checked_cells, text_of
from lipdp_lightning.studies.reproduce.entry_page import page
from lipdp_lightning.studies.reproduce.output import Output
from lipdp_lightning.studies.reproduce.quoted import insert, quotation
from lipdp_lightning.studies.reproduce.store import Store, locked
from lipdp_lightning.studies.reproduce.workers import run_cells


@dataclass(frozen=True)
class Reproduction:
    """The rows in the order of the cells, those that failed, and the page."""

    rows: list[Row]
    failed: list[Row]
    page: Path


def reproduce(
    listed: Listed,
    out: str | Path,
    options: Options | None = None,
    jobs: int = 1,
    tell: Callable[[str], None] = lambda line: None,
    into: Path | None = None,
) -> Reproduction:
    """Runs the cells that have no result yet, and writes figures and page from all rows.

    If a cell failed, there are no figures and no paragraph, since they would describe rows that do not exist.

    Args:
        listed: the entry, as `catalogue.find` returns it.
        out: the directory for the results.
        options: the options of the command; by default a full run.
        jobs: the number of worker processes.
        tell: called with a line of progress for each cell.
        into: a page that quotes the entry between its marks, if one is to be written anew; a run in which a cell failed
            leaves it alone.

    Returns:
        The finished rows, the failed ones, and the path of the page.
    """
    entry, chosen = listed.entry, options or Options()
    if into is not None:
        insert(into, entry.name, "")  # a page without a place is refused before anything is run
    check_data([entry])
    cells = checked_cells(entry, chosen)
    output = Output(Path(out), entry.name)
    made_by = f"lipdp-lightning {__version__}, {entry.name} version {entry.version}{', quick' * chosen.quick}"
    with locked(output.directory / f".{entry.name}.lock"):
        store = Store(output.path(".csv"), cells, made_by)
        wanted = store.pending()
        if len(wanted) < len(cells):
            tell(f"{len(cells) - len(wanted)} of {len(cells)} cells are in {store.path}")
        with closing(run_cells(listed.module, entry.name, cells, wanted, jobs, output.path(".log"))) as outcomes:
            for done, outcome in enumerate(outcomes, start=1 + len(cells) - len(wanted)):
                if outcome.result is None:
                    store.fail(outcome.index, outcome.error, outcome.seconds)
                else:
                    store.add(outcome.index, outcome.result, outcome.seconds)
                text = f"failed: {outcome.error}" if outcome.error else f"{outcome.seconds:.1f} s"
                tell(f"[{done}/{len(cells)}] {describe(cells[outcome.index])}: {text}")
        rows, failed = store.finished(), store.failed()
        paragraph = "" if failed else entry.finish(rows, output)
        if into is not None and not failed:
            quoted = quotation(entry, rows, paragraph, made_by, command_of(entry, chosen))
            write_atomically(into, insert(into, entry.name, quoted))
        text = page(entry, output, rows, failed, len(cells), paragraph, made_by, command_of(entry, chosen))
        return Reproduction(rows, failed, write_atomically(output.path(".md"), text))


def describe(cell: Cell) -> str:
    return " ".join(f"{name}={text_of(value, name)}" for name, value in cell.items())


def command_of(entry: Entry, options: Options) -> str:
    """Returns the command that makes the page again."""
    words = ["lipdp reproduce", entry.name]
    if options.quick:
        words.append("--quick")
    if options.seeds is not None:
        words.append(f"--seeds {options.seeds}")
    return " ".join(words)


def check_data(entries: Sequence[Entry]) -> None:
    """Checks that every file that an entry reads is there; one error names all missing ones."""
    files = list(dict.fromkeys(file for entry in entries for file in entry.data))
    if not files:
        return
    if not os.environ.get("LIPDP_DATA"):
        raise ValueError(
            f"LIPDP_DATA is not set, and {', '.join(files)} below it is read. HINT: set it to the folder of the data; "
            "docs/reproduce.md says where each file is published."
        )
    from ...data_modules.found_files import data_root

    root = data_root(None)
    missing = [file for file in files if not any((root / name).is_file() for name in (file, f"{file}.gz"))]
    if missing:
        raise ValueError(
            f"the data folder {root} (LIPDP_DATA) has no {', '.join(missing)}. "
            "HINT: docs/reproduce.md says where each file is published."
        )
