"""Reads the names of a table's columns, which are public, and nothing else of it."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lipdp_lightning.data_modules.found_files import kind_of, refusal
from lipdp_lightning.data_modules.schema import encoding_problems
from lipdp_lightning.data_modules.suggestions import delimiter_of
from lipdp_lightning.extras import imported

LONGEST_HEADER = 1 << 20


@dataclass(frozen=True)
class Header:
    """The names of a table's columns, and the character between them."""

    names: list[str]
    delimiter: str


def table_header(
    path: Path, names: Sequence[str] | None = None, delimiter: str | None = None, encoding: str = "utf-8"
) -> Header:
    """Returns the names of the columns of a CSV or Parquet file.

    The first line of a CSV file is read, or the names that the end of a Parquet file lists: no row, no type, no number
    of rows, no smallest and largest value. Types are left out since whoever wrote the file may have derived them from
    the rows.

    Args:
        path: the table.
        names: the names of a file without a header line, which is then not read at all.
        delimiter: the character between names; None takes the one that occurs most often in the header line.
        encoding: the encoding of a text file.

    Raises:
        ValueError: if there is no such file, or its first line does not look like names of columns.
    """
    if not path.is_file():
        raise refusal(f"there is no file {path}", "check the path")
    if path.suffix == ".parquet":
        found = _parquet_names(path) if names is None else list(names)
        mark = ","
    elif names is None:
        line = _first_line(path, encoding)
        mark = delimiter or delimiter_of(line)
        found = _split(path, line, mark)
    else:
        found, mark = list(names), delimiter or ","
    if len(set(found)) != len(found) or not all(found):
        raise refusal(f"{path}: two columns have one name, or a column has none", "give each column a name of its own")
    return Header(found, mark)


def _parquet_names(path: Path) -> list[str]:
    parquet = imported("pyarrow.parquet", str(path))
    try:
        return [str(name) for name in parquet.read_schema(path).names]
    except (ValueError, OSError):
        raise refusal(f"{path} is not a Parquet file, or is damaged", "check what wrote it") from None


def _first_line(path: Path, encoding: str) -> str:
    if problems := encoding_problems(encoding):
        raise refusal(problems[0], "give the encoding that the file was saved in")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.readline(LONGEST_HEADER)
    except (OSError, EOFError, zlib.error):
        raise refusal(f"{path} cannot be read", "check its permissions, or fetch it again") from None
    if (kind := kind_of(head[:64])) is not None or b"\0" in head:
        raise refusal(f"{path} is {kind or 'no text'}, not a text table", "give the table itself, as CSV text")
    try:
        line = head.decode("utf-8-sig" if encoding == "utf-8" else encoding).strip("\r\n")
    except UnicodeError:
        raise refusal(f"{path}: its first line is not {encoding} text", "use --encoding latin-1, or another") from None
    if not line.strip():
        raise refusal(f"{path} has an empty first line", "give names of columns in the first line, or --names a,b,c")
    return line


def _split(path: Path, line: str, mark: str) -> list[str]:
    if len(mark) != 1:
        raise refusal(f"the delimiter {mark!r} is not one character", "use one, such as ;")
    try:
        names = [name.strip() for name in next(csv.reader([line], delimiter=mark, skipinitialspace=True, strict=True))]
    except (csv.Error, StopIteration):
        raise refusal(f"{path}: the quotes of its first line do not match", "correct the first line") from None
    if any(_is_number(name) for name in names):
        # the line itself is not shown, since it may be somebody's row
        raise refusal(
            f"{path}: its first line holds a number, so it may be a row and no header",
            "--names a,b,c names the columns of a file without a header line",
        )
    return names


def _is_number(name: str) -> bool:
    try:
        float(name.replace(",", "."))
    except ValueError:
        return False
    return True
