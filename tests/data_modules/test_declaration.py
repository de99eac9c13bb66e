"""Declarations: suggested by public rows and schemas, explained, written as YAML, and read as they were written."""

from __future__ import annotations

import datetime
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from awkward_texts import TEXT, contents
from hypothesis import given, settings
from hypothesis import strategies as st

from lipdp_lightning.data_modules import CSVTable, Declaration
from lipdp_lightning.data_modules.declaration import flow
from lipdp_lightning.data_modules.placeholders import FILL_IN, placeholders, unfilled
from lipdp_lightning.data_modules.schema import Categorical, ClassLabel
from lipdp_lightning.data_modules.schema_yaml import schema_content


@settings(max_examples=150, deadline=None)
@given(contents())
def test_what_is_saved_is_read_again(content: dict[str, Any]) -> None:
    declaration = Declaration(content)
    with tempfile.TemporaryDirectory() as folder:
        read = schema_content(declaration.save(Path(folder) / "s.yaml"))
    assert read == content
    try:
        schema = declaration.table_schema()
    except ValueError as error:  # two spellings are one, or the like
        assert "HINT" in str(error)
        return
    assert Declaration(read).table_schema() == schema


@given(st.recursive(TEXT | st.booleans() | st.integers() | st.none(), lambda inner: st.lists(inner, max_size=3)))
def test_a_value_in_one_line_is_read_as_that_value(value: Any) -> None:
    line = flow(value)
    assert "\n" not in line and yaml.safe_load(line) == value


@pytest.mark.parametrize("text", ["007", "1e3", "1_000", "12:30", "1.50", "2020-01-01", "0x1F", "1.e5"])
def test_a_number_that_is_written_in_its_own_way_is_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.yaml").write_text(
        f"rows: 3\ncolumns: [{{name: a, categories: [{text}, x]}}]\nlabel: {{name: y, values: ['0', '1']}}\n"
    )
    schema, _ = Declaration.of(tmp_path / "s.yaml").table_schema()
    assert schema.columns[0].categories == (text, "x")  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["null", "true", "False", "1.5"])
def test_what_yaml_does_not_read_as_text_has_to_be_quoted(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.yaml").write_text(
        f"rows: 3\ncolumns: [{{name: a, categories: [{text}, x]}}]\nlabel: {{name: y, values: ['0', '1']}}\n"
        f"aliases: {{{text}: a}}\n"
    )
    with pytest.raises(ValueError, match=r"put quotes around it.*put quotes around it"):
        CSVTable("t.csv", str(tmp_path / "s.yaml"))


@pytest.mark.parametrize("text", ["no", "yes", "on", "Off", "y"])
def test_words_that_old_yaml_takes_for_truth_values_are_text(tmp_path: Path, text: str) -> None:
    """Whoever fills in a schema writes ``[no, yes]``, and the cells of the table are text."""
    (tmp_path / "s.yaml").write_text(
        f"rows: 3\ncolumns: [{{name: a, categories: [{text}, x], other: yes}}]\nlabel: {{name: y, values: [no, yes]}}\n"
    )
    schema, _ = Declaration.of(tmp_path / "s.yaml").table_schema()
    (column,) = schema.columns
    assert isinstance(column, Categorical) and column.categories == (text, "x") and column.other is True
    assert schema.label == ClassLabel("y", (("no",), ("yes",)))


def test_a_declaration_to_fill_in_names_every_entry() -> None:
    declaration = Declaration.of_columns(["age", "job", "y", "patient"], label="y", group="patient")
    lines = declaration.missing()
    assert len(lines) == 5 and all("\nHINT: " in line for line in lines)
    assert [path for path, _ in placeholders(declaration.content)][1] == ("columns", "'age'", "kind")
    with pytest.raises(ValueError, match=r"column 'job' is to be filled in(.|\n)*group\.max_rows is to be filled in"):
        declaration.table_schema()
    filled = declaration.declare(
        {"age": {"low": 0, "high": 120}, "job": {"categories": ["a", "b"]}},
        rows=90, label={"name": "y", "values": ["0", "1"]},
        group={"column": "patient", "max_rows": 2, "sampling": "groups"},
    )  # fmt: skip
    assert not filled.missing() and filled.table_schema()[1] == 90
    said = "\n".join(filled.explain())
    assert "'age' is a number, clipped to [0, 120]; it becomes one number of a row" in said
    assert "'job' is one of 2 categories, and another value is refused; it becomes 2 numbers of a row" in said
    assert "'y' is predicted, as one of 2 classes" in said and "all rows of one patient, at most 2" in said


@pytest.mark.parametrize("entry", ["rows", "kind", "low", "high", "categories", "values", "label", "epsilon", "delta"])
def test_every_placeholder_has_a_reason_and_an_example(entry: str) -> None:
    (line,) = unfilled({entry: FILL_IN}, "x.yaml")
    assert line.startswith("x.yaml: ") and "it was left open" not in line and len(line.split("\nHINT: ")) == 2


PUBLIC = {
    "age": [21, 34.5, 88, None],
    "born": ["1950-01-01", "1960-05-05", "", "1999-12-31"],
    "when": [datetime.date(2020, 1, 1)] * 4,
    "job": ["clerk", "farmer", "clerk", "?"],
    "name": [f"n{i}" for i in range(4)],
    "smokes": [True, False, True, True],
    "y": [0, 1, 1, 0],
}


def test_a_public_sample_suggests_kinds_ranges_and_categories() -> None:
    declaration = Declaration.from_public(PUBLIC, label="y")
    entries = {entry["name"]: entry for entry in declaration.content["columns"]}
    assert entries["age"] == {"name": "age", "low": 21, "high": 88}
    assert entries["born"] == {"name": "born", "date": "%Y-%m-%d", "low": "1950-01-01", "high": "2000-01-01"}
    assert entries["when"]["low"] == "2020-01-01" and entries["smokes"]["categories"] == ["False", "True"]
    assert entries["job"] == {"name": "job", "categories": ["clerk", "farmer"], "other": True}
    assert declaration.content["label"] == {"name": "y", "values": ["0", "1"]}
    assert declaration.content["rows"] == FILL_IN and len(declaration.missing()) == 1
    assert declaration.declare(rows=4).table_schema()[0].width == 3 + 3 + 2 + 5
    with pytest.raises(ValueError, match=r"'z' is not a column of the public sample\nHINT"):
        Declaration.from_public(PUBLIC, label="z")


def test_many_texts_are_not_taken_for_categories() -> None:
    found = Declaration.from_public({"name": [f"n{i}" for i in range(99)], "none": [None] * 99})
    assert [entry["kind"] for entry in found.content["columns"]] == [FILL_IN, FILL_IN]
    assert found.content["label"] == FILL_IN


def test_schemas_without_rows_suggest_kinds() -> None:
    types = {"age": "int64", "born": "date32[day]", "job": "large_string", "ok": "bool", "y": "double"}
    entries = {e["name"]: e for e in Declaration.from_public(types, label="y").content["columns"]}
    assert entries["age"] == {"name": "age", "low": FILL_IN, "high": FILL_IN}
    assert entries["job"]["categories"] == FILL_IN and entries["ok"]["categories"] == ["False", "True"]
    assert entries["born"]["date"] == "%Y-%m-%d"
    frictionless = {
        "fields": [
            {"name": "age", "type": "integer", "constraints": {"minimum": 0, "maximum": 120}},
            {"name": "job", "type": "string", "constraints": {"enum": ["a", "b"]}},
            {"name": "y", "type": "boolean"},
        ]
    }
    declaration = Declaration.from_public(frictionless, label="y").declare(rows=10)
    assert not declaration.missing() and declaration.table_schema()[0].width == 3
    assert Declaration.from_public({"fields": ["a", "b"]}).content["columns"][0]["categories"] == ["a", "b"]
    with pytest.raises(ValueError, match="neither a public sample nor a schema"):
        Declaration.from_public(3)


def test_saving_replaces_no_file(tmp_path: Path) -> None:
    declaration = Declaration.from_public(PUBLIC, label="y").declare(rows=4)
    path = declaration.save(tmp_path / "s.yaml")
    assert Declaration.of(path) == declaration and "# job: a category, suggested by" in path.read_text()
    with pytest.raises(ValueError, match="exists, and may hold what you have filled in"):
        declaration.save(path)
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ValueError, match="does not hold a mapping"):
        Declaration.of(tmp_path / "list.yaml")
    assert isinstance(schema_content(path), dict)
