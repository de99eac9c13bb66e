"""Reads tables that other libraries hold: pandas, polars, pyarrow, Hugging Face datasets, mappings and records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lipdp_lightning.data_modules.found_files import refusal
from lipdp_lightning.data_modules.table_cells import stripped


def library_of(value: object) -> str:
    """Returns the name of the library that defines a value's class."""
    return type(value).__module__.partition(".")[0]


def is_table(value: object) -> bool:
    """Returns whether a value holds named columns."""
    if isinstance(value, Mapping):
        return bool(value) and all(map(_is_column, value.values()))
    if isinstance(value, list):
        return bool(value) and all(isinstance(record, Mapping) for record in value)
    if isinstance(value, np.ndarray):
        return value.dtype.names is not None
    return any(hasattr(type(value), name) for name in ("columns", "column_names", "collect_schema"))


def _is_column(value: object) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


def column_names(table: Any) -> list[str]:
    """Returns the names of the columns, which are public, without reading a row."""
    if isinstance(table, Mapping):
        return [str(name) for name in table]
    if isinstance(table, list):
        # every record is asked, so that none decides alone
        return list(dict.fromkeys(str(name) for record in table for name in record))
    if isinstance(table, np.ndarray):
        return [str(name) for name in table.dtype.names or ()]
    if hasattr(table, "collect_schema"):  # polars, eager and lazy
        return [str(name) for name in table.collect_schema()]
    if hasattr(table, "column_names"):  # pyarrow, datasets
        names = table.column_names
        if not isinstance(names, list):
            raise refusal(
                f"{type(table).__name__} holds several tables or does not know its columns",
                "give one of them, such as dataset['train']",
            )
        return [str(name) for name in names]
    return [str(name) for name in table.columns]


def read_columns(table: Any) -> list[list[Any]]:
    """Returns the cells of every column as Python's own values, in the order of `column_names`."""
    if isinstance(table, list):
        return [stripped([record.get(name) for record in table]) for name in column_names(table)]
    if isinstance(table, Mapping):
        columns: list[Any] = list(table.values())
    elif isinstance(table, np.ndarray):
        columns = [table[name] for name in table.dtype.names or ()]
    elif library_of(table) == "polars":
        frame = table.collect() if hasattr(table, "collect") else table
        columns = frame.get_columns()
    elif library_of(table) == "datasets":
        plain = table.with_format(None)
        columns = [plain[name] for name in plain.column_names]
        if not hasattr(plain, "__len__"):
            raise refusal("the dataset is streamed", "load it as a whole: load_dataset(..., streaming=False)")
    elif hasattr(table, "iloc"):  # by position, since two columns may have one name
        columns = [table.iloc[:, place] for place in range(len(table.columns))]
    elif library_of(table) == "pyarrow":
        columns = table.columns
    else:
        columns = [table[name] for name in column_names(table)]
    return [stripped(_listed(column)) for column in columns]


def _listed(column: Any) -> list[Any]:
    for method in ("to_pylist", "to_list", "tolist"):
        if hasattr(column, method):
            return list(getattr(column, method)())
    return list(column)
