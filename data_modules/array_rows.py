"""Reads rows of numbers from arrays, torch datasets, records and images, each row by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipdp_lightning.data_modules.array_schema import ArraySchema
from lipdp_lightning.data_modules.base import GroupedRows, Rows
from lipdp_lightning.data_modules.found_files import refusal
from lipdp_lightning.data_modules.table_cells import ColumnProblem, is_missing, text_of

_CORRECT = "correct the row, or what is declared; nothing is repaired silently"
_MODES = {1: "L", 3: "RGB"}
Row = tuple[Any, Any, Any]


def read_rows(source: Any, schema: ArraySchema, where: str) -> Rows | GroupedRows:
    """Returns features, labels and, where the schema declares groups, the group of each row.

    Args:
        source: a tuple of arrays `(x, y)` or `(x, y, groups)`, or rows: pairs, triples or records with named fields.
        schema: what is declared about a row.
        where: how errors name the rows.

    Raises:
        ValueError: names the first row that breaks the declaration, and shows none of its values.
    """
    features, labels, groups = [], [], []
    for index, (x, y, group) in enumerate(_rows_of(source, schema, where)):
        try:
            features.append(schema.encode(_shaped(x, schema)))
            labels.append(_single(y))
            if schema.grouping is not None:
                groups.append(_group(group))
        except (ValueError, TypeError, RuntimeError) as error:
            raise refusal(f"{where}, row {index} {error}", _CORRECT) from None
    if not features:
        raise refusal(f"{where}: there are no rows", "check what was given")
    try:
        y = torch.from_numpy(schema.label.encode(labels))
    except ColumnProblem as found:
        raise refusal(f"{where}, row {found.index}: {found.told(shows_value=False)}", _CORRECT) from None
    encoded = torch.from_numpy(np.stack(features)), y
    return encoded if schema.grouping is None else (*encoded, groups)


def _rows_of(source: Any, schema: ArraySchema, where: str) -> Iterator[Row]:
    if isinstance(source, tuple):
        yield from _of_arrays(source, schema, where)
        return
    for index, item in enumerate(_items(source, where)):
        if isinstance(item, Mapping):
            yield _of_record(item, schema, f"{where}, row {index}")
        elif isinstance(item, tuple | list) and len(item) == 2 + (schema.grouping is not None):
            yield (*item, None)[:3]
        else:
            parts = "(x, y)" if schema.grouping is None else "(x, y, group)"
            raise refusal(f"{where}, row {index} is not {parts}", "return these parts, or a mapping with named fields")


def _of_arrays(source: tuple[Any, ...], schema: ArraySchema, where: str) -> Iterator[Row]:
    wanted = 2 if schema.grouping is None else 3
    if len(source) != wanted:
        raise refusal(
            f"{where} has {len(source)} arrays, and the declaration needs {wanted}", "give (x, y), or (x, y, groups)"
        )
    parts = [part.detach().cpu().numpy() if isinstance(part, Tensor) else part for part in source]
    if len({len(part) for part in parts}) != 1:
        raise refusal(f"{where}: the arrays have different numbers of rows", "give one label for each row")
    return iter(zip(*parts, strict=True)) if wanted == 3 else ((x, y, None) for x, y in zip(*parts, strict=True))


def _items(source: Any, where: str) -> Iterator[Any]:
    """Yields the items of a dataset; whatever it raises is told without its words, which may quote a row."""
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        items: Iterable[Any] = (source[index] for index in range(len(source)))
    else:
        items = source
    read, index = iter(items), 0
    while True:
        try:
            item = next(read)
        except StopIteration:
            return
        except Exception as error:
            if isinstance(error, ValueError) and "HINT" in str(error):
                raise
            problem = f"{where}, row {index} cannot be read, {type(error).__name__}"
            raise refusal(problem, "read this row by hand to see why") from None
        yield item
        index += 1


def _of_record(item: Mapping[str, Any], schema: ArraySchema, where: str) -> Row:
    label, group = schema.label.name, None if schema.grouping is None else schema.grouping.column
    wanted = [name for name in (schema.features, label, group) if name is not None]
    missing = [name for name in wanted if name not in item]
    if missing or schema.features is None:
        named = ", ".join(map(repr, missing)) or "declared as its features"
        raise refusal(f"{where} has no field {named}", "declare features: image and label: {name: label, ...}")
    return item[schema.features], item[label], None if group is None else item[group]


def _shaped(x: Any, schema: ArraySchema) -> np.ndarray:
    """Returns one row as an array of the declared shape."""
    array = _pixels(x, schema) if hasattr(x, "convert") and hasattr(x, "resize") and hasattr(x, "mode") else None
    if array is None:
        array = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    if array.shape != schema.shape:
        raise ValueError(f"does not have the declared shape {list(schema.shape)}")
    return array


def _pixels(image: Any, schema: ArraySchema) -> np.ndarray:
    from PIL import Image

    if len(schema.shape) != 3 or schema.shape[0] not in _MODES:
        raise ValueError(f"is an image, and the declared shape is {list(schema.shape)}, not channels, height and width")
    channels, height, width = schema.shape
    converted = image.convert(_MODES[channels])
    if converted.size != (width, height):
        if not schema.resize:
            raise ValueError("is an image of another size; resize: true scales each by itself")
        converted = converted.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(converted, dtype=np.uint8).reshape(height, width, channels).transpose(2, 0, 1)


def _single(y: Any) -> Any:
    """Returns a label as a single value."""
    if isinstance(y, Tensor | np.ndarray):
        if y.size != 1 if isinstance(y, np.ndarray) else y.numel() != 1:
            raise ValueError("has a label that is not a single value")
        return y.item()
    return y


def _group(name: Any) -> str:
    if is_missing(name := _single(name), {""}):
        raise ValueError("has no group: without it nobody can say whose row it is")
    try:
        return text_of(name)
    except ValueError as error:
        raise ValueError(f"has a group that {error}") from None


def gives_a_row_again(source: Any) -> bool:
    """Returns whether a dataset with positions gives the same first row when it is read twice."""
    if not (isinstance(source, Sequence) or (hasattr(source, "__getitem__") and hasattr(source, "__len__"))):
        return True
    if isinstance(source, tuple) or not len(source):
        return True
    try:
        first, second = (source[0] for _ in range(2))
    except Exception:  # told with its row when all are read
        return True
    return _same(first, second)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Mapping):
        return all(_same(first[name], second[name]) for name in first)
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(np.array_equal(np.asarray(first), np.asarray(second)))
