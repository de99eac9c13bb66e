"""Defines `Declaration`: what is public about private rows, as the YAML that `lipdp fit` reads."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse.typing import register_type

from lipdp_lightning.data_modules.array_schema import ArraySchema, load_array_schema
from lipdp_lightning.data_modules.found_files import refusal
from lipdp_lightning.data_modules.placeholders import FILL_IN, unfilled
from lipdp_lightning.data_modules.schema import TableSchema
from lipdp_lightning.data_modules.schema_yaml import load_schema, schema_content
from lipdp_lightning.files import write_bytes_atomically

_HEAD = """\
# What is public about these rows. It comes from the questionnaire, the code book or common knowledge, and never from
# the rows: a range or a list of categories that was read from them tells that somebody is in them.
"""
_TO_DO = f"# Replace every {FILL_IN}; training is refused before.\n"
_KINDS = """\
# Each column is one of
#   a number    {name: age, low: 0, high: 120}         values beyond are clipped; `log: true` for a long tail
#   a category  {name: job, categories: [a, [b, B]]}   a list holds the spellings of one; `other: true` takes the rest
#   a date      {name: born, date: "%Y-%m-%d", low: 1920-01-01, high: 2010-12-31}
#   left out    move its name to `ignore`; `kind` goes once one of these is chosen
# Text with a mark in it needs quotes: "# pills". For numbers such as 1.234,5 add the line
#   numbers: {decimal: ",", thousands: "."}
# and where cells are empty or hold a mark such as NA, which are refused otherwise, the line
#   missing: {markers: ["NA"], policy: bucket}
"""
_ROWS = (
    "# N of the plan: the announced number of rows, or of groups where groups are drawn. The file may differ by 5 %\n"
)
_SHAPE = "# The shape of one row; low and high are the declared range of its numbers, mapped onto [-1, 1].\n"
_LABEL = """\
# What is predicted: {name: bought, values: ["no", "yes"]}, classes in order, or {name: price, low: 0, high: 500}.
"""
_GROUP = "# All rows of one group are protected together; at most max_rows of them count.\n"
_UNIT = """\
# The guarantee is for one row. If several rows belong to one person, protect them together:
# group: {column: patient, max_rows: 3, sampling: groups}
"""
# words that YAML does not read as text
_TAKEN = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


class Declaration:
    """Holds what is declared about private rows; entries may be left to fill in.

    Args:
        content: the content of a schema in YAML (`data_modules.schema_yaml`), or of a declaration of arrays
            (`data_modules.array_schema`).
        origin: how errors name the declaration, such as the file that it was read from.
        notes: a remark for a column, which is written beside it.
        suggested_by: the public object that a suggestion was made from; the private rows must be another.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        origin: str = "the schema",
        notes: Mapping[str, str] | None = None,
        suggested_by: object = None,
    ) -> None:
        self.content: dict[str, Any] = {str(key): _plain(value) for key, value in content.items()}
        self.origin = origin
        self.notes, self.suggested_by = dict(notes or {}), suggested_by

    # ---- where it comes from

    @classmethod
    def of(cls, value: Declaration | str | Path | Mapping[str, Any]) -> Declaration:
        """Returns the declaration in a YAML file, or in the content of one."""
        if isinstance(value, Declaration):
            return value
        if isinstance(value, Mapping):
            return cls(value)
        content = schema_content(Path(value))
        if not isinstance(content, dict):
            raise refusal(f"{value} does not hold a mapping", "start with `lipdp init`, or Declaration.of_columns")
        return cls(content, str(value))

    @classmethod
    def of_columns(
        cls, names: Sequence[str], label: str | None = None, group: str | None = None, max_rows: int | None = None
    ) -> Declaration:
        """Returns a declaration to fill in, from nothing but the names of the columns, which are public."""
        features = [name for name in names if name not in (label, group)]
        content: dict[str, Any] = {"rows": FILL_IN, "columns": [{"name": name, "kind": FILL_IN} for name in features]}
        content["label"] = FILL_IN if label is None else {"name": label, "kind": FILL_IN}
        if group is not None:
            content["group"] = _group(group, max_rows)
        return cls(content)

    @classmethod
    def of_arrays(cls, shape: Sequence[int] | None = None) -> Declaration:
        """Returns a declaration of arrays to fill in."""
        content: dict[str, Any] = dict.fromkeys(("rows", "shape", "low", "high"), FILL_IN)
        if shape is not None:
            content["shape"] = [int(size) for size in shape]
        return cls({**content, "label": {"classes": FILL_IN}})

    @classmethod
    def from_public(
        cls, public: object, label: str | None = None, group: str | None = None, max_rows: int | None = None
    ) -> Declaration:
        """Returns a declaration that a PUBLIC sample or schema suggests, to be checked and completed.

        Args:
            public: a DataFrame, a CSV or Parquet file or a mapping of columns whose rows are public, such as a sample
                that was published or made up; or a schema without rows, as pyarrow, polars and Frictionless have them.
            label: the column that is predicted.
            group: the column that names the group of a row.
            max_rows: the number of rows of one group that may count.
        """
        from lipdp_lightning.data_modules.suggestions import suggest

        columns, notes, label_entry = suggest(public, label, group)
        content: dict[str, Any] = {"rows": FILL_IN, "columns": columns, "label": label_entry}
        if group is not None:
            content["group"] = _group(group, max_rows)
        return cls(content, "the suggested declaration", notes, public)

    def declare(self, columns: Mapping[str, Mapping[str, Any]] | None = None, **entries: Any) -> Declaration:
        """Returns a declaration with entries replaced.

        Args:
            columns: for the name of a column, its entry without the name, such as `{"age": {"low": 0, "high": 120}}`.
            entries: top-level keys such as `rows`, `label` or `group`.
        """
        content = {**self.content, **entries}
        if columns:
            given = {name: {"name": name, **entry} for name, entry in columns.items()}
            kept = [given.pop(str(_name(entry)), entry) for entry in content.get("columns", [])]
            content["columns"] = [*kept, *given.values()]
        return Declaration(content, self.origin, self.notes, self.suggested_by)

    # ---- what it says

    @property
    def is_of_arrays(self) -> bool:
        return "shape" in self.content and "columns" not in self.content

    def missing(self) -> list[str]:
        """Returns a line for each entry that is left to fill in, with the reason and an example."""
        return unfilled(self.content, self.origin)

    def table_schema(self) -> tuple[TableSchema, int]:
        """Returns the schema of a table and the declared number of rows; all problems are told at once."""
        return self._named(load_schema)

    def array_schema(self) -> tuple[ArraySchema, int]:
        """Returns the schema of arrays and the declared number of rows; all problems are told at once."""
        return self._named(load_array_schema)

    def _named(self, load: Any) -> Any:
        if missing := self.missing():
            raise ValueError("\n".join(missing))
        try:
            return load(self.content)
        except ValueError as error:
            raise ValueError(re.sub("^the schema", self.origin, str(error))) from None

    def explain(self) -> list[str]:
        """Returns a sentence for each entry of a complete declaration."""
        if self.is_of_arrays:
            arrays, rows = self.array_schema()
            first = f"N is computed from {rows}, the declared number of rows."
            return [first, f"A row has the shape {list(arrays.shape)}: {arrays.describe()}.", *_of_group(arrays)]
        schema, rows = self.table_schema()
        lines = [f"N is computed from {rows}, the declared number of rows."]
        lines += [column.sentence(schema.bucket) for column in schema.columns]
        return [*lines, schema.label.sentence(), *_of_group(schema)]

    # ---- YAML

    def text(self) -> str:
        """Returns the declaration as commented YAML."""
        parts = [_HEAD + (_TO_DO if self.missing() else "")]
        for key, value in self.content.items():
            if key == "columns":
                lines = [self._column(entry) for entry in value]
                parts.append(f"{_KINDS}columns:\n" + "".join(lines))
            else:
                comment = {"rows": _ROWS, "shape": _SHAPE, "label": _LABEL, "group": _GROUP}.get(key, "")
                parts.append(f"{comment}{key}: {flow(value)}\n")
        if "columns" in self.content and "ignore" not in self.content:
            parts.append("# Columns of the file that are not used:\n# ignore: [id]\n")
        if "group" not in self.content:
            parts.append(_UNIT)
        return "\n".join(parts)

    def _column(self, entry: Any) -> str:
        name = _name(entry)
        note = self.notes.get(name) if isinstance(name, str) else None
        return f"  - {flow(entry)}\n" if note is None else f"  # {flow(name)}: {note}\n  - {flow(entry)}\n"

    def save(self, path: str | Path) -> Path:
        """Writes the commented YAML, and refuses to replace a file."""
        target = Path(path)
        if target.exists():
            raise refusal(f"{target} exists, and may hold what you have filled in", "name another file")
        return write_bytes_atomically(target, self.text().encode())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Declaration) and self.content == other.content

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Declaration({self.content!r})"


def _name(entry: Any) -> Any:
    return entry.get("name") if isinstance(entry, dict) else None


def _of_group(schema: TableSchema | ArraySchema) -> list[str]:
    if schema.grouping is None:
        return ["The guarantee is for one row; rows that belong to one person need a group."]
    described = schema.grouping.describe()
    return [f"{described[0].upper()}{described[1:]}."]


def _group(column: str, max_rows: int | None) -> dict[str, Any]:
    return {"column": column, "max_rows": FILL_IN if max_rows is None else max_rows, "sampling": "groups"}


def _plain(value: Any) -> Any:
    """Returns a value as YAML holds it; dates and tuples become texts and lists."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, datetime.date) else value


def flow(value: Any) -> str:
    """Returns a value as YAML in one line; text that YAML could read as anything else is quoted."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(key)}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    if isinstance(value, str):
        simple = re.fullmatch(r"[A-Za-z_](?:[\w .-]*\w)?", value, re.ASCII) and value.lower() not in _TAKEN
        return value if simple else yaml.dump(value, default_style='"', allow_unicode=True, width=10**9).strip()
    return yaml.dump(value, default_flow_style=True, width=10**9).split("\n")[0]


def _from_parser(value: Any) -> Declaration:
    """Returns the declaration that a configuration holds or names; what it says is checked when the data is made."""
    if isinstance(value, Mapping):
        return Declaration(value)
    if not isinstance(value, str | Path):
        raise ValueError("an option cannot replace a part of a schema. HINT: change the schema, or give all of it")
    return Declaration.of(value)


# a configuration that is written holds the schema itself, so that it can be used without the file
register_type(
    Declaration,
    serializer=lambda value: value.content,
    deserializer=_from_parser,
    type_check=lambda value, kind: isinstance(value, kind),
    fail_already_registered=False,
)
