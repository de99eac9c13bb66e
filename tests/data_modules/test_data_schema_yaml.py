"""Schemas in YAML: read as written, and refused by key and by row."""

from __future__ import annotations

from pathlib import Path

import pytest

from lipdp_lightning.data_modules import schema_yaml
from lipdp_lightning.data_modules.csv_table import CSVTable
from lipdp_lightning.data_modules.schema import Categorical, ClassLabel, NumberLabel, Numeric
from lipdp_lightning.data_modules.schema_yaml import load_schema
from lipdp_lightning.data_modules.units import Grouping

GOOD = """
rows: 100
delimiter: ";"
comment: "#"
names: [age, gain, sex, id, income]
missing: {markers: ["?", "NA"], policy: bucket}
scale: symmetric
ignore: [id]
aliases: {Age: age}
columns:
  - {name: age, low: 17, high: 90}
  - {name: gain, low: 0, high: 1e5, log: true}
  - {name: sex, categories: [Female, Male, 3], other: true}
label: {name: income, values: ["<=50K", [">50K", ">50K."]]}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "schema.yaml"
    path.write_text(text)
    return path


def test_every_key_arrives(tmp_path: Path) -> None:
    schema, rows = load_schema(write(tmp_path, GOOD))
    assert rows == 100
    assert schema.columns == (
        Numeric("age", 17, 90),
        Numeric("gain", 0, 100_000, log=True),
        Categorical("sex", ("Female", "Male", "3"), other=True),
    )
    assert schema.label == ClassLabel("income", (("<=50K",), (">50K", ">50K.")))
    assert (schema.delimiter, schema.comment, schema.scale, schema.ignore) == (";", "#", "symmetric", ("id",))
    assert (schema.missing, schema.missing_policy, schema.aliases) == (("?", "NA"), "bucket", {"Age": "age"})
    assert schema.names == ("age", "gain", "sex", "id", "income")


def test_a_regression_and_the_defaults(tmp_path: Path) -> None:
    text = "rows: 5\ncolumns: [{name: a, low: 0, high: 1}]\nlabel: {name: price, low: 0, high: 9}\n"
    schema, _ = load_schema(write(tmp_path, text))
    assert schema.label == NumberLabel("price", 0, 9)
    assert (schema.delimiter, schema.names, schema.missing_policy) == (",", None, "error")


def test_the_example_in_the_documentation_is_a_schema(tmp_path: Path) -> None:
    lines = (schema_yaml.__doc__ or "").splitlines()
    example = "\n".join(line[4:] for line in lines if line.startswith("    "))
    schema, rows = load_schema(write(tmp_path, example))
    assert rows == 32561 and len(schema.columns) == 4


BAD = {
    "unknown key": (GOOD + "sheet: 2\n", "unknown key 'sheet'; the keys are aliases, columns"),
    "unknown column key": (GOOD.replace("high: 90", "high: 90, mean: 3"), "column 'age': unknown key 'mean'"),
    "no rows": (GOOD.replace("rows: 100\n", ""), "'rows' is missing"),
    "rows": (GOOD.replace("rows: 100", "rows: many"), "rows is 'many'"),
    "truth values": (GOOD.replace("[Female, Male, 3]", "[true, false]"), "put quotes around it"),
    "label truth values": (GOOD.replace('"<=50K", [">50K", ">50K."]', "true, false"), "put quotes around it"),
    "range": (GOOD.replace("low: 17", "low: 170"), "low = 170.0 and high = 90.0"),
    "range text": (GOOD.replace("low: 17", "low: young"), "column 'age': low is 'young', not a number"),
    "no high": (GOOD.replace(", high: 90", ""), "column 'age': 'high' is missing"),
    "columns": (GOOD.replace("columns:\n", "columns: 3\nold:\n"), "columns is 3"),
    "label": (GOOD.replace("label: {name: income,", "label: {"), "'name' is missing"),
    "one class": (GOOD.replace('"<=50K", ', ""), "at least two classes"),
    "duplicate": (GOOD.replace("name: gain", "name: age"), "'age' is declared twice"),
    "policy": (GOOD.replace("bucket", "mean"), "missing_policy is 'mean'"),
    "log": (GOOD.replace("log: true", "log: 10"), "log is 10, not true or false"),
    "categories": (GOOD.replace("[Female, Male, 3]", "Female"), "is 'Female', not a list"),
    "yaml": (GOOD + "columns: [unclosed\n", "schema.yaml, row "),
    "list": ("- a\n- b\n", "not a mapping"),
    "a mark without quotes": (GOOD.replace("{name: age", "{name: # age"), "expected"),
    "control character": (GOOD + "# \x07\n", "not YAML"),
    "nothing": ("# only a comment\n", "not a mapping"),
    "empty": ("", "is empty"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_schema_is_refused_with_file_and_key(case: str, tmp_path: Path) -> None:
    text, message = BAD[case]
    with pytest.raises(ValueError) as caught:
        load_schema(write(tmp_path, text))
    first, hint = str(caught.value).split("\n")
    assert message in first and "schema.yaml" in first and hint.startswith("HINT: ")


def test_all_problems_of_a_schema_are_told_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("rows: 100", "rows: 0").replace("log: true", "log: 1") + "extra: 1\n"
    with pytest.raises(ValueError) as caught:
        load_schema(write(tmp_path, text))
    assert all(part in str(caught.value) for part in ("rows is 0", "log is 1", "'extra'"))


def test_groups_bins_and_crosses(tmp_path: Path) -> None:
    text = (
        "rows: 5\ncolumns: [{name: a, low: 0, high: 1, bins: 4}, {name: b, categories: [x, y]}]\n"
        "label: {name: price, low: 0, high: 9}\ncrosses: [[a, b]]\n"
    )
    schema, _ = load_schema(write(tmp_path, text + "group: {column: house, max_rows: 3, sampling: groups}\n"))
    assert schema.columns[0] == Numeric("a", 0, 1, bins=4) and schema.crosses == (("a", "b"),)
    assert schema.grouping == Grouping("house", 3, "groups")
    for bad, message in {
        "group: {column: house}": "group: 'max_rows' is missing",
        "group: {column: house, max_rows: 0}": "max_rows is 0",
        "group: [house]": "group is .* not a mapping",
        "ignore: [house]\ngroup: {column: house, max_rows: 2}": "'house' names the group and is ignored",
        "crosses: [[a]]": "crosses is .* not a list of pairs",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_schema(write(tmp_path, text.replace("crosses: [[a, b]]\n", "") + bad))


def test_a_table_with_a_group_column(tmp_path: Path) -> None:
    """From the file to the plan's unit; a row without its group is refused by file and row."""
    schema = (
        "rows: 40\ncolumns: [{name: a, low: 0, high: 99}]\nlabel: {name: y, values: ['0', '1']}\n"
        "group: {column: house, max_rows: 2}\n"
    )
    lines = [f"{i // 3},{i},{i % 2}" for i in range(60)]
    for text, refused in ((lines, False), ([*lines[:7], ",7,1", *lines[8:]], True)):
        (tmp_path / "t.csv").write_text("\n".join(["house,a,y", *text]))
        module = CSVTable(str(tmp_path / "t.csv"), str(write(tmp_path, schema)), validation_fraction=0.0)
        if refused:
            with pytest.raises(ValueError, match=r"t\.csv, row 9, column 'house': the group is missing"):
                module.setup()
            continue
        module.setup()
        assert (module.rows, module.unit, module.max_examples_per_unit) == (40, "group", 2)
