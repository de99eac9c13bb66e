"""Suggests declarations from public rows, or from a schema that holds no rows."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lipdp_lightning.data_modules.found_files import read_text, refusal
from lipdp_lightning.data_modules.frames import column_names, is_table, library_of, read_columns
from lipdp_lightning.data_modules.placeholders import FILL_IN
from lipdp_lightning.data_modules.table_cells import (
    ColumnProblem,
    day_text,
    is_missing,
    parse_days,
    parse_numbers,
    texts,
)
from lipdp_lightning.extras import imported

MOST_CATEGORIES = 50
MOST_CLASSES = 20
_MISSING = ("", "?", "NA", "N/A", "nan", "NaN", "null", "None")
_FORMS = ("%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y", "%Y-%m-%d %H:%M:%S")
_KINDS = (
    (r"bool", {"categories": ["False", "True"]}),
    (r"u?int|float|double|decimal|number|integer|real|numeric|half", {"low": FILL_IN, "high": FILL_IN}),
    (r"date|time", {"date": "%Y-%m-%d", "low": FILL_IN, "high": FILL_IN}),
    (r"", {"categories": FILL_IN}),
)
Suggested = tuple[list[dict[str, Any]], dict[str, str], dict[str, Any] | str]


def suggest(public: Any, label: str | None, group: str | None) -> Suggested:
    """Returns entries of the columns, remarks on them, and the entry of the label."""
    public = _opened(public)
    fields = public.get("fields") if isinstance(public, Mapping) else None
    if isinstance(fields, list) and fields and all(isinstance(field, Mapping) and "name" in field for field in fields):
        found = {str(field["name"]): _of_field(field) for field in fields}
    elif (types := _types(public)) is not None:
        found = {name: (_of_type(kind), f"the schema says {kind}") for name, kind in types.items()}
    else:
        found = {name: _of_cells(cells) for name, cells in zip(column_names(public), read_columns(public), strict=True)}
    unknown = [name for name in (label, group) if name is not None and name not in found]
    if unknown:
        raise refusal(f"{' and '.join(map(repr, unknown))} is not a column of the public sample", "check the spelling")
    features = {name: entry for name, entry in found.items() if name not in (label, group)}
    columns = [{"name": name, **entry} for name, (entry, _) in features.items()]
    notes = {name: f"{note}; check it." for name, (_, note) in features.items()}
    return columns, notes, _label(label, public, found)


def _opened(public: Any) -> Any:
    if not isinstance(public, str | Path):
        return public
    path = Path(public)
    if path.suffix == ".parquet":
        return imported("pyarrow.parquet", str(path)).read_table(path)
    return records_of(path)


def records_of(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a public CSV file."""
    import csv
    import io

    lines = io.StringIO(read_text(path), newline="")
    mark = delimiter_of(lines.readline())
    lines.seek(0)
    reader = csv.DictReader(lines, delimiter=mark, skipinitialspace=True, restkey="")
    return [{str(key).strip(): str(value).strip() for key, value in row.items() if key} for row in reader]


def delimiter_of(header: str) -> str:
    """Returns the character that separates the names of a header line."""
    return max(",;\t|", key=header.count)


def _types(public: Any) -> dict[str, str] | None:
    """Returns the types of a schema that holds no rows, as text; None for anything else."""
    if library_of(public) == "pyarrow" and type(public).__name__ == "Schema":
        return {field.name: str(field.type) for field in public}
    if isinstance(public, Mapping) and not is_table(public):  # also polars' Schema
        return {str(name): str(kind) for name, kind in public.items()}
    if not is_table(public):
        raise refusal(
            f"{type(public).__name__} is neither a public sample nor a schema",
            "give a DataFrame, a mapping of columns, a CSV or Parquet file, or a schema of pyarrow, polars, "
            "Frictionless",
        )
    return None


def _of_type(kind: str) -> dict[str, Any]:
    listed = re.search(r"Enum\(categories=\[(.*)\]\)", kind)
    if listed:
        return {"categories": re.findall(r"'([^']*)'", listed[1])}
    return dict(next(entry for pattern, entry in _KINDS if re.match(pattern, kind.lower())))


def _of_field(field: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    limits = field.get("constraints", {})
    entry = _of_type(str(field.get("type", "string")))
    if "enum" in limits:
        entry = {"categories": [str(value) for value in limits["enum"]]}
    entry |= {end: limits[key] for end, key in (("low", "minimum"), ("high", "maximum")) if key in limits}
    return entry, f"the schema says {field.get('type', 'string')}"


def _of_cells(cells: Sequence[Any]) -> tuple[dict[str, Any], str]:
    """Returns the entry that public cells suggest, and a remark."""
    present = [cell for cell in cells if not is_missing(cell, _MISSING)]
    seen = f"suggested by {len(present)} public values"
    if not present:
        return {"kind": FILL_IN}, "the public sample has no value"
    if all(isinstance(cell, bool) for cell in present):
        return {"categories": ["False", "True"]}, seen
    with suppress(ColumnProblem):
        numbers = parse_numbers(present)
        low, high = _outward(float(numbers.min()), float(numbers.max()))
        return {"low": low, "high": high}, f"a number, {seen}"
    for form in _FORMS:
        with suppress(ColumnProblem):
            days = parse_days(present, form)
            first, last = (day_text(math.floor(end)) for end in (days.min(), days.max() + 1))
            return {"date": form, "low": first, "high": last}, f"a date, {seen}"
    with suppress(ColumnProblem):
        distinct = sorted(set(texts(present)))
        if len(distinct) <= MOST_CATEGORIES:
            return {"categories": distinct, "other": True}, f"a category, {seen}"
    return {"kind": FILL_IN}, "text with many values; leave it out, or declare its categories"


def _outward(low: float, high: float) -> tuple[float, float]:
    """Returns the range widened to two digits, since a sample does not hold the smallest and largest value."""
    unit = 10.0 ** math.floor(math.log10(max(abs(low), abs(high), 1e-300)) - 1) if low or high else 1.0
    ends = math.floor(low / unit) * unit, math.ceil(high / unit) * unit
    if ends[0] == ends[1]:
        ends = ends[0], ends[1] + unit
    first, last = (float(f"{end:.6g}") for end in ends)
    return (int(first), int(last)) if first.is_integer() and last.is_integer() else (first, last)


def _label(name: str | None, public: Any, found: Mapping[str, tuple[dict[str, Any], str]]) -> dict[str, Any] | str:
    if name is None:
        return FILL_IN
    entry = {key: value for key, value in found[name][0].items() if key != "other"}
    if "low" in entry and is_table(public):
        cells = read_columns(public)[column_names(public).index(name)]
        distinct = sorted(set(parse_numbers([cell for cell in cells if not is_missing(cell, _MISSING)])))
        if len(distinct) <= MOST_CLASSES and all(value.is_integer() for value in distinct):
            return {"name": name, "values": [str(int(value)) for value in distinct]}
    if "categories" in entry:
        return {"name": name, "values": entry["categories"]}
    return {"name": name, **entry}
