"""Reads columns of a table, and writes a set of new files, all of them or none."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from lipdp_lightning.curves.discrete_noise import FloatArray
from lipdp_lightning.files import flush_directory, naming, open_new, temporary_name


def read_texts(path: str | Path, columns: Sequence[str], delimiter: str = ",") -> list[list[str]]:
    """Returns the named columns of a CSV file with a header (also .gz), as text."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{file} is not a file. HINT: --data names a CSV file with a header.")
    raw = file.read_bytes()
    try:
        text = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode("utf-8-sig")
    except (UnicodeDecodeError, OSError, EOFError) as error:
        raise ValueError(
            f"{file} is not a text file in UTF-8 ({type(error).__name__}). HINT: export it as CSV."
        ) from error
    rows = [row for row in csv.reader(io.StringIO(text), delimiter=delimiter) if row]
    header = [name.strip() for name in rows[0]] if rows else []
    missing = [name for name in columns if name not in header]
    if missing:
        raise ValueError(
            f"{file} has no column {', '.join(map(repr, missing))}. HINT: it has {', '.join(header[:20]) or 'none'}."
        )
    if len(rows) == 1:
        raise ValueError(f"the column {columns[0]!r} of {file} is empty. HINT: check the file.")
    short = next((i for i, row in enumerate(rows[1:], start=2) if len(row) != len(header)), None)
    if short is not None:
        raise ValueError(f"line {short} of {file} has another number of columns. HINT: check the delimiter.")
    return [[row[header.index(name)].strip() for row in rows[1:]] for name in columns]


def as_numbers(texts: Iterable[str], column: str) -> FloatArray:
    """Returns finite numbers; the error about a value that is not one names its line without showing it."""
    numbers = []
    for line, text in enumerate(texts, start=2):
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"line {line}: column {column!r} holds no number. HINT: remove or fill missing values.")
        numbers.append(number)
    return np.array(numbers)


def csv_text(columns: Mapping[str, FloatArray]) -> str:
    """Returns a CSV text with one row per index."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([f"{value:.10g}" for value in row] for row in zip(*columns.values(), strict=True))
    return stream.getvalue()


def check_new(directory: str | Path, names: Iterable[str]) -> None:
    """Refuses to overwrite files: a release cannot be undone, and its record must not disappear."""
    root = Path(directory)
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} is not a directory. HINT: name a new one.")
    taken = [name for name in names if (root / name).exists()]
    if taken:
        raise ValueError(
            f"{root} already holds {', '.join(taken)}, the record of a release. HINT: use another directory; "
            "a further release of the same data spends its epsilon again."
        )


def write_new(directory: str | Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Writes files that do not exist yet; none appears before all of them are on the disk."""
    check_new(directory, contents)
    root = Path(directory)
    staged: dict[Path, Path] = {}
    try:
        with naming(root):
            root.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            temporary = temporary_name(root / name)
            staged[temporary] = root / name
            with naming(root / name), open(open_new(temporary), "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
        for temporary, target in staged.items():
            with naming(target):
                os.replace(temporary, target)
    finally:
        for temporary in staged:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    flush_directory(root)
    return list(staged.values())
