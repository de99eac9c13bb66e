"""Encodes the cells of a table as tensors, by its schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipdp_lightning.data_modules.found_files import refusal
from lipdp_lightning.data_modules.schema import TableSchema
from lipdp_lightning.data_modules.table_cells import ColumnProblem, is_missing, texts


@dataclass(frozen=True)
class RawTable:
    """The cells of a table: its columns by name, and the line of the file that each row came from.

    Args:
        path: the file, or what the table is called in errors.
        columns: the cells of each column; those of a text file are text.
        lines: the number by which errors name each row.
        shows_values: whether errors may show a cell, to the owner of a file that has to be corrected.
    """

    path: Path | str
    columns: Mapping[str, Sequence[Any]]
    lines: Sequence[int]
    shows_values: bool = True


def header_problems(names: Sequence[str], declared: Sequence[str], ignored: Sequence[str]) -> list[str]:
    """Returns every way in which the names of columns disagree with the declaration."""
    problems = [f"column {name!r} appears twice" for name in sorted({n for n in names if names.count(n) > 1})]
    problems += [f"declared column {name!r} is missing" for name in declared if name not in names]
    known = {*declared, *ignored}
    return problems + [f"column {name!r} is not declared" for name in dict.fromkeys(names) if name not in known]


def match_columns(path: Path | str, names: list[str], schema: TableSchema, labelled: bool = True) -> list[str]:
    """Returns the declared name of each column of the file; all disagreements are reported at once.

    Args:
        path: the file, or what the table is called in errors.
        names: the names of the columns, in their order.
        schema: the declaration.
        labelled: whether the label and the group must be there; otherwise they may be.
    """
    names = [schema.aliases.get(name, name) for name in names]
    declared = [column.name for column in schema.columns]
    beside = [schema.label.name]
    if schema.grouping is not None and schema.grouping.column not in (*declared, *beside):
        beside.append(schema.grouping.column)
    needed, ignored = ([*declared, *beside], schema.ignore) if labelled else (declared, (*beside, *schema.ignore))
    if problems := header_problems(names, needed, ignored):
        raise refusal(
            f"{path}, header: "
            + "; ".join(problems[:8])
            + (f"; {len(problems) - 8} more" if len(problems) > 8 else ""),
            "check the delimiter, declare the column, or list it under ignore; "
            "a file without a header line needs names in the schema",
        )
    return names


def _missing(table: RawTable, schema: TableSchema, name: str) -> np.ndarray:
    markers = {"", *schema.missing}
    return np.array([is_missing(cell, markers) for cell in table.columns[name]], dtype=bool)


def _kept(table: RawTable, schema: TableSchema, labelled: bool = True) -> list[int]:
    """Returns which rows are not left out as missing; the content of a row alone decides, so no row affects another."""
    if schema.missing_policy != "drop":
        return list(range(len(table.lines)))
    used = [column.name for column in schema.columns] + [schema.label.name] * labelled
    gone = np.logical_or.reduce([_missing(table, schema, name) for name in used])
    return [int(index) for index in np.flatnonzero(~gone)]


def _of_rows(table: RawTable, kept: list[int]) -> RawTable:
    if len(kept) == len(table.lines):
        return table
    return RawTable(
        table.path,
        {name: [values[index] for index in kept] for name, values in table.columns.items()},
        [table.lines[index] for index in kept],
        table.shows_values,
    )


def encode(table: RawTable, schema: TableSchema) -> tuple[Tensor, Tensor]:
    """Encodes the rows of a table.

    Returns:
        `(x, y)`: x is float32 of width `schema.width`; y holds int64 classes or float32 targets in [-1, 1].

    Raises:
        ValueError: names the file and, for every offending column, its first offending row.
    """
    x, y = _encoded(_of_rows(table, _kept(table, schema)), schema, labelled=True)
    return torch.from_numpy(x), torch.from_numpy(y)


def encode_features(table: RawTable, schema: TableSchema) -> tuple[Tensor, list[int]]:
    """Encodes the features of a table, whose label is not read, for predictions.

    Returns:
        `(x, kept)`: x as in `encode`, and the places in the table of the rows that were not dropped as missing.
    """
    kept = _kept(table, schema, labelled=False)
    return torch.from_numpy(_encoded(_of_rows(table, kept), schema, labelled=False)[0]), kept


def _encoded(table: RawTable, schema: TableSchema, labelled: bool) -> tuple[np.ndarray, np.ndarray]:
    if not table.lines:
        raise refusal(f"{table.path} has no rows", "the export was cut off, or every row was dropped as missing")
    x = np.empty((len(table.lines), schema.width), dtype=np.float32)
    y = np.empty(0)
    problems: list[str] = []

    def attempt(name: str, work: Callable[[], np.ndarray]) -> np.ndarray | None:
        try:
            return work()
        except ColumnProblem as found:
            problems.append(
                f"{table.path}, row {table.lines[found.index]}, column {name!r}: {found.told(table.shows_values)}"
            )
            return None

    def feature(column_index: int) -> np.ndarray:
        column = schema.columns[column_index]
        missing = _missing(table, schema, column.name)
        if missing.any() and not schema.bucket:
            raise ColumnProblem(int(np.argmax(missing)), "is missing")
        return column.encode(table.columns[column.name], missing, schema.scale, schema.bucket)

    spans = schema.spans()
    for index, column in enumerate(schema.columns):
        block = attempt(column.name, lambda index=index: feature(index))  # type: ignore[misc]
        if block is not None:
            x[:, spans[column.name]] = block
    if labelled:
        label = attempt(schema.label.name, lambda: schema.label.encode(table.columns[schema.label.name]))
        y = y if label is None else label
    if problems:
        raise refusal(
            "; ".join(problems),
            "correct the file or the declaration; `other: true` takes unlisted categories, `missing` the marks of "
            "none, `numbers` a decimal comma",
        )
    _add_crosses(x, schema)
    return x, y


def _add_crosses(x: np.ndarray, schema: TableSchema) -> None:
    """Writes the one-hot block of each pair behind the columns; it is a function of one row and of the declaration."""
    spans, named = schema.spans(), {column.name: column for column in schema.columns}
    start = sum(column.width(schema.bucket) for column in schema.columns)
    for first, second in schema.crosses:
        left, right = (named[name].block(x[:, spans[name]]) for name in (first, second))
        end = start + schema.cross_width((first, second))
        x[:, start:end] = (left[:, :, None] * right[:, None, :]).reshape(len(x), -1)
        start = end


def group_names(table: RawTable, schema: TableSchema) -> list[str]:
    """Returns the group of every row that `encode` keeps; a missing group is an error, not a group of its own."""
    assert schema.grouping is not None
    column = schema.grouping.column
    table = _of_rows(table, _kept(table, schema))
    gone = _missing(table, schema, column)
    try:
        if gone.any():
            raise ColumnProblem(int(np.argmax(gone)), "is missing", noun="group")
        return texts(table.columns[column])
    except ColumnProblem as found:
        raise refusal(
            f"{table.path}, row {table.lines[found.index]}, column {column!r}: {found.told(table.shows_values)}",
            "give every row its group: without it nobody can say whose rows they are",
        ) from None
