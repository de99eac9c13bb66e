"""A `TableSchema` from YAML, strictly: an unknown key or a value of the wrong kind is an error that names it.

`rows`, `columns` and `label` are needed; `names` is for a file without a header line, and the others have defaults.

    rows: 32561                    # declared number of records
    delimiter: ","
    encoding: utf-8                # or latin-1, cp1252, ...
    numbers: {decimal: ".", thousands: ","}               # 1,234.5; the default has no mark between thousands
    names: [age, gain, sex, born, id, income]
    missing: {markers: ["?"], policy: bucket}
    scale: unit                    # [0, 1]; or symmetric, [-1, 1]
    ignore: [id]
    aliases: {Age: age}
    columns:
      - {name: age, low: 17, high: 90}
      - {name: gain, low: 0, high: 99999, log: true, bins: 8}
      - {name: sex, categories: [Female, [Male, male, M]], other: true}      # a list holds the spellings of one
      - {name: born, date: "%d.%m.%Y", low: 01.01.1920, high: 31.12.2010}    # in the letters of strptime
    crosses: [[gain, sex]]         # joint categories of two columns
    group: {column: patient, max_rows: 3, sampling: rows, excess: drop}
    label: {name: income, values: ["<=50K", ">50K"]}      # or {name: price, low: 0, high: 500001}
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from lipdp_lightning.data_modules.found_files import read_text, refusal
from lipdp_lightning.data_modules.placeholders import refuse_placeholders
from lipdp_lightning.data_modules.schema import Categorical, ClassLabel, Date, NumberLabel, Numeric, TableSchema
from lipdp_lightning.data_modules.table_cells import PLAIN, NumberFormat, days_of
from lipdp_lightning.data_modules.units import Grouping

_TOP = {
    "rows", "delimiter", "names", "comment", "missing", "scale", "ignore", "aliases",
    "columns", "crosses", "group", "label", "encoding", "numbers",
}  # fmt: skip


class _Loader(yaml.SafeLoader):
    """Keeps the text of numbers and dates that are written in a way of their own, and of yes, no, on and off."""


def _as_written(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    text = str(loader.construct_scalar(node))
    for kind in (int, float):
        with suppress(ValueError):
            if text in (str(kind(text)), yaml.safe_dump(kind(text)).split()[0]):
                return kind(text)
    return text


def _truth(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    text = str(loader.construct_scalar(node))
    return {"true": True, "false": False}.get(text.lower(), text)


for _tag in ("int", "float", "timestamp"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _as_written)
_Loader.add_constructor("tag:yaml.org,2002:bool", _truth)


_WORDS = {"yes": True, "on": True, "no": False, "off": False}


class Reader:
    """Opens a declaration and collects every problem in it, so that all are reported at once.

    Args:
        source: a YAML file, or the content of one.
        allowed: the keys that it may have.
        required: the keys that it must have.

    Attributes:
        path: its name in errors.
        top: what it holds.
        rows: the declared number of rows.
        grouping: the group of a row, if it declares one.

    Raises:
        ValueError: if an entry is still to be filled in.
    """

    def __init__(self, source: str | Path | Mapping[str, Any], allowed: set[str], required: set[str]) -> None:
        self.problems: list[str] = []
        if isinstance(source, Mapping):
            self.path, content = "the schema", dict(source)
        else:
            self.path, content = str(source), schema_content(Path(source))
        refuse_placeholders(content, self.path)
        self.top = self.keys("schema", content, allowed, required)
        rows = self.top.get("rows", 1)
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            self.problems.append(f"rows is {rows!r}, not a positive integer")
        self.rows: int = rows
        self.grouping = self.group(self.top["group"]) if "group" in self.top else None

    def refuse_problems(self, hint: str) -> None:
        """Raises one ValueError with every problem, if there are any."""
        if self.problems:
            raise refusal(f"{self.path}: " + "; ".join(self.problems), hint)

    def keys(self, where: str, value: Any, allowed: set[str], required: set[str]) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.problems.append(f"{where} is {value!r}, not a mapping")
            return {}
        self.problems += [
            f"{where}: unknown key {key!r}; the keys are {', '.join(sorted(allowed))}"
            for key in value
            if key not in allowed
        ]
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
        value = _WORDS.get(value, value) if isinstance(value, str) else value
        if not isinstance(value, bool):
            self.problems.append(f"{where} is {value!r}, not true or false")
        return bool(value)

    def text(self, where: str, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int):
            # YAML reads a bare true or false as a truth value, and 1e3 as 1000.0
            self.problems.append(f"{where} is {value!r}, not text: put quotes around it")
        return str(value)

    def texts(self, where: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list):
            self.problems.append(f"{where} is {value!r}, not a list")
            return ()
        return tuple(self.text(where, item) for item in value)

    def spellings(self, where: str, value: Any) -> tuple[str, ...]:
        """Returns the texts that stand for one category or class."""
        return self.texts(where, value if isinstance(value, list) else [value])

    def column(self, index: int, value: Any, written: NumberFormat) -> Numeric | Categorical | None:
        where = f"columns[{index}]"
        if isinstance(value, dict) and "name" in value:
            where = f"column {value['name']!r}"
        if isinstance(value, dict) and "categories" in value:
            entry = self.keys(where, value, {"name", "categories", "other"}, {"name"})
            listed = entry["categories"]
            if not isinstance(listed, list):
                self.problems.append(f"{where}: categories is {listed!r}, not a list")
                listed = []
            found = [self.spellings(f"{where}: categories", item) for item in listed]
            categories = tuple(item[0] if len(item) == 1 else item for item in found)
            other = self.flag(f"{where}: other", entry.get("other", False))
            return Categorical(self.text(where, entry.get("name", "")), categories, other)
        known = {"name", "low", "high", "log", "bins", "date"}
        entry = self.keys(where, value, known, {"name", "low", "high"})
        if not {"name", "low", "high"} <= set(entry):
            return None
        log, bins = self.flag(f"{where}: log", entry.get("log", False)), entry.get("bins", 0)
        name = self.text(where, entry["name"])
        if "date" in entry:
            form = self.text(f"{where}: date", entry["date"])
            first, last = (self.day(f"{where}: {end}", entry[end], form) for end in ("low", "high"))
            return Date(name, first, last, log, bins, form=form)
        low, high = (self.number(f"{where}: {end}", entry[end]) for end in ("low", "high"))
        return Numeric(name, low, high, log, bins, written)

    def day(self, where: str, value: Any, form: str) -> float:
        if isinstance(value, datetime.date):
            return days_of(value)
        for known in (form, "%Y-%m-%d"):
            with suppress(ValueError):
                return days_of(datetime.datetime.strptime(str(value), known))
        self.problems.append(f"{where} is {value!r}, not a date of the form {form!r}")
        return float("nan")

    def written(self, value: Any) -> NumberFormat:
        entry = self.keys("numbers", value, {"decimal", "thousands"}, set())
        marks = {key: self.text(f"numbers: {key}", mark) for key, mark in entry.items()}
        form = NumberFormat(**{key: mark for key, mark in marks.items() if key in ("decimal", "thousands")})
        self.problems += form.problems()
        return form

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

    def label(self, value: Any, written: NumberFormat = PLAIN) -> ClassLabel | NumberLabel | None:
        if isinstance(value, dict) and "values" in value:
            entry = self.keys("label", value, {"name", "values"}, {"name"})
            classes = entry["values"] if isinstance(entry["values"], list) else []
            name = self.text("label", entry.get("name", ""))
            return ClassLabel(name, tuple(self.spellings("label: values", item) for item in classes))
        entry = self.keys("label", value, {"name", "low", "high"}, {"name", "low", "high"})
        if not {"name", "low", "high"} <= set(entry):
            return None
        low, high = (self.number(f"label: {end}", entry[end]) for end in ("low", "high"))
        return NumberLabel(self.text("label", entry["name"]), low, high, written)


def load_schema(source: str | Path | Mapping[str, Any]) -> tuple[TableSchema, int]:
    """Returns the schema in a YAML file, or in the content of one, and the number of rows that it declares."""
    reader = Reader(source, _TOP, {"rows", "columns", "label"})
    top, written = reader.top, reader.written(reader.top.get("numbers", {}))
    listed = top.get("columns", [])
    if not isinstance(listed, list):
        reader.problems.append(f"columns is {listed!r}, not a list")
        listed = []
    columns = [reader.column(index, value, written) for index, value in enumerate(listed)]
    label = reader.label(top["label"], written) if "label" in top else None
    missing = reader.keys("missing", top.get("missing", {}), {"markers", "policy"}, set())
    listed_aliases = top.get("aliases", {})
    known = set(listed_aliases) if isinstance(listed_aliases, dict) else set()
    aliases = reader.keys("aliases", listed_aliases, known, set())
    options: dict[str, Any] = {
        "names": reader.texts("names", top["names"]) if "names" in top else None,
        "ignore": reader.texts("ignore", top.get("ignore", [])),
        "missing": reader.texts("missing: markers", missing.get("markers", [""])),
        "aliases": {
            reader.text("aliases: a name", key): reader.text("aliases", value) for key, value in aliases.items()
        },
        "crosses": reader.crosses(top.get("crosses", [])),
        "grouping": reader.grouping,
    }
    for key, value in (("delimiter", ","), ("comment", None), ("scale", "unit"), ("encoding", "utf-8")):
        given = top.get(key, value)
        options[key] = None if given is None and key == "comment" else reader.text(key, given)
    reader.refuse_problems("help('lipdp_lightning.data_modules.schema_yaml') in Python shows every key with an example")
    assert label is not None
    try:
        schema = TableSchema(
            columns=tuple(column for column in columns if column is not None),
            label=label,
            missing_policy=str(missing.get("policy", "error")),
            **options,
        )
    except ValueError as error:
        raise ValueError(f"{reader.path}: {error}") from None
    return schema, reader.rows


def schema_content(path: Path) -> Any:
    """Returns what a YAML file holds; a number that is not written as Python would write it stays text, such as 007."""
    text = read_text(path)
    try:
        return _Loader(text).get_single_data()  # a SafeLoader, used as yaml.safe_load uses its own
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        row = f", row {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise refusal(
            f"{path}{row}: {problem}", 'correct the YAML; text with a mark in it needs quotes, as in {name: "# pills"}'
        ) from None
