"""Defines an entry: a list of cells, how one is computed, and what is said about all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lipdp_lightning.bound_text import upper_text

if TYPE_CHECKING:
    from lipdp_lightning.studies.reproduce.output import Output

Value = str | int | float | bool | None
Cell = Mapping[str, Value]
Row = Mapping[str, Value]
Rows = Sequence[Row]

# Every row has these columns. certified_epsilon is a number for a release, inf where there is no guarantee
# (a method without privacy), None where nothing about a record is released (a count of bytes, a running time).
PRIVACY_COLUMNS = ("certified_epsilon", "delta", "adjacency")
# The framework adds these columns.
MADE_BY, SECONDS, ERROR = "made_by", "cpu_seconds", "error"


@dataclass(frozen=True)
class Options:
    """The options of the command. `seeds` is the number of repetitions, None for the entry's own."""

    quick: bool = False
    seeds: int | None = None

    def seed_range(self, full: int, quick: int = 1) -> range:
        """Returns the seeds of every cell: `full` of them, `quick` with --quick, or the number given by --seeds."""
        return range(self.seeds if self.seeds is not None else quick if self.quick else full)


@dataclass(frozen=True)
class Claim:
    """A published statement, and the corresponding one from our rows; `ours` gets all rows in the order of
    the cells.
    """

    what: str
    published: str
    ours: Callable[[Rows], str]


@dataclass(frozen=True)
class Entry:
    """A table or figure.

    Args:
        name: its name on the command line.
        title: the heading of its page.
        source: paper and table or figure.
        expected_time: the time of a full run with one job, for `lipdp reproduce --list`.
        cells: the cells in the order of the rows. A cell holds everything that its result depends on: it is the key by
            which a finished one is recognised, and the first columns of its row.
        run: returns the remaining columns of a cell's row, in a worker process with one thread; PRIVACY_COLUMNS are
            among them. Exceptions are recorded, and the other cells continue.
        finish: draws figures through its second argument and returns a paragraph (Markdown) from the rows.
        claims: published numbers, shown beside ours.
        data: files below LIPDP_DATA that `run` reads (plain or .gz); they are looked for before anything is run.
        table: returns what the page shows of the rows, if not all of them; `summarize` averages over the seeds.
        version: to be raised when the same cell gives another result; older files are then refused.
    """

    name: str
    title: str
    source: str
    expected_time: str
    cells: Callable[[Options], Sequence[Cell]]
    run: Callable[[Cell], Row]
    finish: Callable[[Rows, Output], str]
    claims: Sequence[Claim] = ()
    data: Sequence[str] = ()
    table: Callable[[Rows], Rows] | None = None
    version: int = 1


def checked_cells(entry: Entry, options: Options) -> list[Cell]:
    """Returns the cells, each of them once; anything wrong with them is a mistake of the entry."""
    cells = list(entry.cells(options))
    if not cells:
        raise ValueError(f"{entry.name} has no cells for these options. HINT: use --seeds 1 or more.")
    keys = [key_of(cell) for cell in cells]
    assert len(set(keys)) == len(keys), f"{entry.name} has the same cell twice"
    return cells


def checked_result(cell: Cell, result: Row) -> Row:
    """Returns a result that can be a row: it has no column of the cell or of the framework, and states its privacy."""
    taken = sorted(set(result) & {*cell, MADE_BY, SECONDS, ERROR})
    if taken:
        raise ValueError(f"the result repeats {', '.join(taken)}. HINT: return the other columns only.")
    missing = [name for name in PRIVACY_COLUMNS if name not in {*result, *cell}]
    if missing:
        raise ValueError(f"the result does not say {', '.join(missing)}. HINT: return None where nothing is released.")
    for name, value in result.items():
        text_of(value, name)
    return result


def text_of(value: Value, name: str = "a value") -> str:
    """Returns the value as it stands in the CSV file; floats keep all their digits."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, str):
        return " ".join(value.split())
    raise ValueError(f"{name} is a {type(value).__name__}. HINT: use text, numbers, booleans and None only.")


def value_of(text: str) -> Value:
    """Inverts `text_of`; a text that looks like a number becomes one."""
    if text in ("", "true", "false"):
        return None if not text else text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def key_of(cell: Cell) -> tuple[tuple[str, str], ...]:
    """Returns the key that tells cells apart."""
    return tuple((name, text_of(value, name)) for name, value in sorted(cell.items()))


def describe_epsilon(value: Value) -> str:
    """Returns the text for the page: a number, or in words why there is none."""
    if value is None:
        return "nothing released"
    assert isinstance(value, int | float)
    return "none (not private)" if math.isinf(value) else upper_text(value)
