"""Stores the finished cells of an entry in a CSV file.

The file is rewritten as a whole, by a rename, whenever a cell finishes: a reader, or a run that continues after a kill
at any moment, finds complete rows in the order of the cells.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lipdp_lightning.report.atomic import write_atomically
from lipdp_lightning.studies.reproduce.entry import ERROR, MADE_BY, SECONDS, Cell, Row, Rows, key_of, text_of, value_of

_LAST = (SECONDS, ERROR, MADE_BY)


class Store:
    """Rows of `cells` in `path`. A file made by another version, entry or set of options is refused, not changed."""

    def __init__(self, path: Path, cells: Sequence[Cell], made_by: str) -> None:
        self.path, self.made_by = path, made_by
        self._cells = list(cells)
        self._index = {key_of(cell): i for i, cell in enumerate(self._cells)}
        self._shapes = sorted({tuple(sorted(cell)) for cell in self._cells})
        self._rows: dict[int, Row] = {}
        if path.exists():
            self._read()

    def pending(self) -> list[int]:
        """Returns the indices of the cells that have no result; failed cells are among them."""
        return [i for i in range(len(self._cells)) if i not in self._rows or self._rows[i].get(ERROR)]

    def add(self, index: int, result: Row, seconds: float) -> None:
        """Writes the result of a cell, in place of an earlier failure."""
        # values as they will be read again, so that a text that looks like a number is one the first time too
        values = {name: value_of(text_of(value, name)) for name, value in result.items()}
        self._rows[index] = {**self._cells[index], **values, SECONDS: round(seconds, 3)}
        self._write()

    def fail(self, index: int, error: str, seconds: float) -> None:
        """Records that a cell failed; it counts as pending."""
        self._rows[index] = {**self._cells[index], ERROR: error, SECONDS: round(seconds, 3)}
        self._write()

    def finished(self) -> list[Row]:
        """Returns rows of the cells that have a result, in the order of the cells."""
        return [row for _, row in sorted(self._rows.items()) if not row.get(ERROR)]

    def failed(self) -> list[Row]:
        return [row for _, row in sorted(self._rows.items()) if row.get(ERROR)]

    def _write(self) -> None:
        rows = [row for _, row in sorted(self._rows.items())]
        write_atomically(self.path, to_csv([{**row, MADE_BY: self.made_by} for row in rows]))

    def _read(self) -> None:
        for line, row in read_csv(self.path):
            if row.get(MADE_BY) != self.made_by:
                raise self._refusal(f"line {line} was made by {row.get(MADE_BY) or 'something else'!r}")
            index = self._cell_of(row)
            if index is None:
                raise self._refusal(f"line {line} is not a cell of these options")
            values = {name: value_of(text) for name, text in row.items() if name != MADE_BY and text}
            texts = {ERROR: row[ERROR]} if row.get(ERROR) else {}
            # an empty field is a written None, or a column that only other rows have; both are None
            empty = {name: None for name, text in row.items() if name not in _LAST and not text}
            self._rows[index] = {**empty, **values, **texts, **self._cells[index]}

    def _cell_of(self, row: dict[str, str]) -> int | None:
        """Returns the index of the row's cell; the cells of one entry may have different columns."""
        keys = [tuple((name, row.get(name, "")) for name in names) for names in self._shapes]
        return next((self._index[key] for key in keys if key in self._index), None)

    def _refusal(self, problem: str) -> ValueError:
        return ValueError(
            f"{self.path} belongs to another run: {problem}, and this one is {self.made_by!r}. "
            "HINT: the same options continue it; other options need another --out."
        )


def columns_of(rows: Rows) -> list[str]:
    """Returns all columns in order of appearance, those of the framework last."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [name for name in names if name not in _LAST] + [name for name in _LAST if name in names]


def to_csv(rows: Rows) -> str:
    names = columns_of(rows)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([text_of(row.get(name), name) for name in names] for row in rows)
    return stream.getvalue()


def read_csv(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields line numbers and fields."""
    rows = [row for row in csv.reader(io.StringIO(path.read_text(encoding="utf-8"))) if row]
    for line, row in enumerate(rows[1:], start=2):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"{path}, line {line}: {len(row)} columns instead of {len(rows[0])}. HINT: use another --out."
            )
        yield line, dict(zip(rows[0], row, strict=True))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Locks a file against other processes; the lock ends with the process."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process holds {path}. HINT: wait for it, or use another --out.") from None
        yield
