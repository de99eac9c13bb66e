"""A `TableSchema` from YAML, strictly: an unknown key or a value of the wrong kind is an error that names it.

`rows`, `columns` and `label` are needed; `names` is for a file without a header line, and the others have defaults.

    rows: 32561                    # declared number of records
    delimiter: ","
    names: [age, gain, sex, id, income]
    missing: {markers: ["?"], policy: bucket}
    scale: unit                    # [0, 1]; or symmetric, [-1, 1]
    ignore: [id]
    aliases: {Age: age}
    columns:
      - {name: age, low: 17, high: 90}
      - {name: gain, low: 0, high: 99999, log: true, bins: 8}
      - {name: sex, categories: [Female, Male], other: true}
    crosses: [[gain, sex]]         # joint categories of two columns
    group: {column: patient, max_rows: 3, sampling: rows, excess: drop}
    label: {name: income, values: ["<=50K", ">50K"]}      # or {name: price, low: 0, high: 500001}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lipdp_lightning.data_modules.found_files import read_text, refusal
from lipdp_lightning.data_modules.schema import Categorical, ClassLabel, NumberLabel, Numeric, TableSchema
from lipdp_lightning.data_modules.units import Grouping

_TOP = {
    "rows", "delimiter", "names", "comment", "missing", "scale", "ignore", "aliases",
    "columns", "crosses", "group", "label",
}  # fmt: skip


class _Reader:
    """Collects every problem of a schema file, so that all are reported at once."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def keys(self, where: str, value: Any, allowed: set[str], required: set[str]) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.problems.append(f"{where} is {value!r}, not a mapping")
            return {}
        self.problems += [f"{where}: unknown key {key!r}" for key in value if key not in allowed]
        self.problems += [f"{where}: {key!r} is missing" for key in sorted(required - set(value))]
        return value

    def number(self, where: str, value: Any) -> float:
        try:
            # YAML reads 1e5 as text, since its exponent has no sign
            return float("none" if isinstance(value, bool) else value)
        except (TypeError, ValueError):
            self.problems.append(f"{where} is {value!r}, not a number")
            return float("nan")

    def flag(self, where: str, value: Any) -> bool:
        if not isinstance(value, bool):
            self.problems.append(f"{where} is {value!r}, not true or false")
        return bool(value)

    def text(self, where: str, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            # YAML reads a bare yes, no, on or off as a truth value
            self.problems.append(f"{where} is {value!r}, not text: put quotes around it")
        return str(value)

    def texts(self, where: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list):
            self.problems.append(f"{where} is {value!r}, not a list")
            return ()
        return tuple(self.text(where, item) for item in value)

    def column(self, index: int, value: Any) -> Numeric | Categorical | None:
        where = f"columns[{index}]"
        if isinstance(value, dict) and "name" in value:
            where = f"column {value['name']!r}"
        if isinstance(value, dict) and "categories" in value:
            entry = self.keys(where, value, {"name", "categories", "other"}, {"name"})
            categories = self.texts(f"{where}: categories", entry["categories"])
            return Categorical(
                str(entry.get("name")), categories, self.flag(f"{where}: other", entry.get("other", False))
            )
        entry = self.keys(where, value, {"name", "low", "high", "log", "bins"}, {"name", "low", "high"})
        if not {"name", "low", "high"} <= set(entry):
            return None
        low, high = (self.number(f"{where}: {end}", entry[end]) for end in ("low", "high"))
        log = self.flag(f"{where}: log", entry.get("log", False))
        return Numeric(self.text(where, entry["name"]), low, high, log, entry.get("bins", 0))

    def group(self, value: Any) -> Grouping | None:
        entry = self.keys("group", value, {"column", "max_rows", "sampling", "excess"}, {"column", "max_rows"})
        if not {"column", "max_rows"} <= set(entry):
            return None
        try:
            options = {name: entry[name] for name in ("sampling", "excess") if name in entry}
            return Grouping(self.text("group: column", entry["column"]), entry["max_rows"], **options)
        except ValueError as error:
            self.problems.append(str(error).split("\n")[0])
            return None

    def crosses(self, value: Any) -> tuple[tuple[str, str], ...]:
        pairs = [self.texts("crosses", pair) for pair in value] if isinstance(value, list) else None
        if pairs is None or any(len(pair) != 2 for pair in pairs):
            self.problems.append(f"crosses is {value!r}, not a list of pairs of columns")
            return ()
        return tuple((pair[0], pair[1]) for pair in pairs)

    def label(self, value: Any) -> ClassLabel | NumberLabel | None:
        if isinstance(value, dict) and "values" in value:
            entry = self.keys("label", value, {"name", "values"}, {"name"})
            classes = entry["values"] if isinstance(entry["values"], list) else []
            spellings = [item if isinstance(item, list) else [item] for item in classes]
            return ClassLabel(str(entry.get("name")), tuple(self.texts("label: values", item) for item in spellings))
        entry = self.keys("label", value, {"name", "low", "high"}, {"name", "low", "high"})
        if not {"name", "low", "high"} <= set(entry):
            return None
        low, high = (self.number(f"label: {end}", entry[end]) for end in ("low", "high"))
        return NumberLabel(self.text("label", entry["name"]), low, high)


def load_schema(source: str | Path | Mapping[str, Any]) -> tuple[TableSchema, int]:
    """Returns the schema in a YAML file, or in the content of one, and the number of rows that it declares."""
    if isinstance(source, Mapping):
        path, content = "the schema", dict(source)
    else:
        path, content = str(source), _content(Path(source))
    reader = _Reader()
    top = reader.keys("schema", content, _TOP, {"rows", "columns", "label"})
    rows = top.get("rows", 0)
    if "rows" in top and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        reader.problems.append(f"rows is {rows!r}, not a positive integer")
    listed = top.get("columns", [])
    if not isinstance(listed, list):
        reader.problems.append(f"columns is {listed!r}, not a list")
        listed = []
    columns = [reader.column(index, value) for index, value in enumerate(listed)]
    label = reader.label(top["label"]) if "label" in top else None
    missing = reader.keys("missing", top.get("missing", {}), {"markers", "policy"}, set())
    aliases = reader.keys("aliases", top.get("aliases", {}), set(top.get("aliases") or ()), set())
    options: dict[str, Any] = {
        "names": reader.texts("names", top["names"]) if "names" in top else None,
        "ignore": reader.texts("ignore", top.get("ignore", [])),
        "missing": reader.texts("missing: markers", missing.get("markers", [""])),
        "aliases": {str(key): str(value) for key, value in aliases.items()},
        "crosses": reader.crosses(top.get("crosses", [])),
        "grouping": reader.group(top["group"]) if "group" in top else None,
    }
    for key, value in (("delimiter", ","), ("comment", None), ("scale", "unit")):
        given = top.get(key, value)
        options[key] = given if given is None else reader.text(key, given)
    if reader.problems:
        raise refusal(f"{path}: " + "; ".join(reader.problems), "the keys are listed in data_modules/schema_yaml.py")
    assert label is not None
    try:
        schema = TableSchema(
            columns=tuple(column for column in columns if column is not None),
            label=label,
            missing_policy=str(missing.get("policy", "error")),
            **options,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return schema, rows


def _content(path: Path) -> Any:
    try:
        return yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        row = f", row {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise refusal(f"{path}{row}: {problem}", "correct the YAML") from None
