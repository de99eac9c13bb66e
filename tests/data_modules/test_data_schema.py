"""Declared ranges and categories: what a row becomes, what is refused, and that no row decides about another."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lipdp_lightning.data_modules.encoding import RawTable, encode
from lipdp_lightning.data_modules.schema import (
    Categorical,
    ClassLabel,
    NumberLabel,
    Numeric,
    TableSchema,
    expanded,
    scale_declared,
)
from lipdp_lightning.data_modules.table_cells import ColumnProblem, parse_numbers

COLUMNS = (Numeric("age", 20, 60), Categorical("sex", ("F", "M")))
LABEL = ClassLabel("y", (("no",), ("yes", "yes.")))


def table(**columns: list[str]) -> RawTable:
    count = len(next(iter(columns.values())))
    return RawTable(Path("t.csv"), columns, list(range(2, count + 2)))


def people(age: list[str], sex: list[str], y: list[str] | None = None) -> RawTable:
    return table(age=age, sex=sex, y=["no"] * len(age) if y is None else y)


def test_numbers_are_clipped_and_scaled_and_categories_one_hot() -> None:
    x, y = encode(
        people(["20", "50", "99", "-5"], ["F", "M", "M", "F"], ["no", "yes", "yes.", "no"]), TableSchema(COLUMNS, LABEL)
    )
    assert x.tolist() == [[0, 1, 0], [0.75, 0, 1], [1, 0, 1], [0, 1, 0]]
    assert x.dtype == torch.float32 and y.tolist() == [0, 1, 1, 0] and y.dtype == torch.int64


def test_symmetric_scale_and_log_axis() -> None:
    x, _ = encode(people(["20", "40", "60"], ["F"] * 3), TableSchema(COLUMNS, LABEL, scale="symmetric"))
    assert x[:, 0].tolist() == [-1, 0, 1]
    assert scale_declared(np.array([0.0, 9.0, 99.0, 500.0]), 0, 99, log=True).tolist() == pytest.approx([0, 0.5, 1, 1])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.booleans(), st.sampled_from(["unit", "symmetric"]))
def test_scaling_keeps_order_and_stays_in_its_interval(values: list[float], log: bool, scale: str) -> None:
    scaled = scale_declared(np.sort(np.array(values)), -3.0, 1000.0, scale, log)
    low = 0.0 if scale == "unit" else -1.0
    assert (np.diff(scaled) >= 0).all() and scaled.min() >= low and scaled.max() <= 1.0


@given(st.lists(st.tuples(st.integers(-50, 150), st.sampled_from("FM?")), min_size=1, max_size=20))
def test_every_row_stays_within_the_declared_norm(rows: list[tuple[int, str]]) -> None:
    schema = TableSchema(COLUMNS, LABEL, missing=("?",), missing_policy="bucket", scale="symmetric")
    x, _ = encode(people([str(age) for age, _ in rows], [sex for _, sex in rows]), schema)
    assert x.double().norm(dim=1).max() <= schema.input_bound == math.sqrt(2)
    assert x.shape[1] == schema.width == 4


@pytest.mark.parametrize("policy", ["bucket", "drop"])
def test_a_row_is_encoded_by_itself(policy: str) -> None:
    schema = TableSchema(COLUMNS, LABEL, missing=("?",), missing_policy=policy)
    ages, sexes = ["20", "?", "59", "31"], ["F", "M", "?", "M"]
    alone = [
        encode(people([age], [sex]), schema)[0] for age, sex in zip(ages, sexes, strict=True) if "?" not in (age, sex)
    ]
    if policy == "bucket":
        alone = [encode(people([age], [sex]), schema)[0] for age, sex in zip(ages, sexes, strict=True)]
    assert torch.equal(encode(people(ages, sexes), schema)[0], torch.cat(alone))


def test_missing_values_by_policy() -> None:
    ages, sexes = ["20", "?", "60"], ["F", "M", ""]
    bucket, _ = encode(people(ages, sexes), TableSchema(COLUMNS, LABEL, missing=("?",), missing_policy="bucket"))
    assert bucket.tolist() == [[0, 1, 0, 0], [0.5, 0, 1, 0], [1, 0, 0, 1]]
    dropped, labels = encode(people(ages, sexes), TableSchema(COLUMNS, LABEL, missing=("?",), missing_policy="drop"))
    assert dropped.tolist() == [[0, 1, 0]] and len(labels) == 1
    with pytest.raises(ValueError) as caught:
        encode(people(ages, sexes), TableSchema(COLUMNS, LABEL, missing=("?",)))
    assert "row 3, column 'age': the value is missing" in str(caught.value)
    assert "row 4, column 'sex': the value is missing" in str(caught.value)


def test_a_row_number_survives_dropped_rows() -> None:
    schema = TableSchema(COLUMNS, LABEL, missing_policy="drop")
    with pytest.raises(ValueError, match="row 4, column 'age': 'old' is not a number"):
        encode(people(["20", "", "old"], ["F", "F", "F"]), schema)


def test_every_row_missing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"t\.csv has no rows.*\nHINT"):
        encode(people(["", ""], ["F", "F"]), TableSchema(COLUMNS, LABEL, missing_policy="drop"))


def test_an_unknown_category_is_an_error_or_the_declared_other_bucket() -> None:
    with pytest.raises(ValueError, match=r"t\.csv, row 3, column 'sex': 'X' is not a declared category.*\nHINT"):
        encode(people(["30", "30"], ["F", "X"]), TableSchema(COLUMNS, LABEL))
    other = (COLUMNS[0], Categorical("sex", ("F", "M"), other=True))
    x, _ = encode(people(["20", "20"], ["F", "X"]), TableSchema(other, LABEL))
    assert x[:, 1:].tolist() == [[1, 0, 0], [0, 0, 1]]


def test_other_and_missing_are_different_buckets() -> None:
    columns = (Categorical("sex", ("F",), other=True),)
    x, _ = encode(
        table(sex=["F", "X", "?"], y=["no"] * 3), TableSchema(columns, LABEL, missing=("?",), missing_policy="bucket")
    )
    assert x.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "1_000", "x", "0x10", "1,5"])
def test_what_is_not_a_finite_number_is_refused_with_its_row(value: str) -> None:
    with pytest.raises(ValueError, match=r"t\.csv, row 3, column 'age'.*\nHINT"):
        encode(people(["30", value], ["F", "F"]), TableSchema(COLUMNS, LABEL))


def test_parse_numbers_agrees_with_python() -> None:
    assert parse_numbers(["1", " -2.5e3", "+.5"]).tolist() == [1.0, -2500.0, 0.5]
    with pytest.raises(ColumnProblem) as caught:
        parse_numbers(["1", "2", "_"])
    assert caught.value.index == 2


def test_labels_outside_the_declaration_are_refused() -> None:
    with pytest.raises(ValueError, match="row 3, column 'y': label 'maybe' is not one of the declared classes"):
        encode(people(["30", "30"], ["F", "F"], ["no", "maybe"]), TableSchema(COLUMNS, LABEL))
    price = NumberLabel("y", 0, 10)
    _, y = encode(people(["30"] * 3, ["F"] * 3, ["0", "5", "10"]), TableSchema(COLUMNS, price))
    assert y.tolist() == [-1, 0, 1] and y.dtype == torch.float32
    for bad in ("10.5", "-0.1", "nan", "", "?"):
        with pytest.raises(ValueError, match="row 3, column 'y'"):
            encode(people(["30"] * 2, ["F"] * 2, ["1", bad]), TableSchema(COLUMNS, price))


def test_one_problem_per_column_is_told_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        encode(people(["30", "x"], ["?", "F"], ["no", "maybe"]), TableSchema(COLUMNS, LABEL))
    assert all(f"column '{name}'" in str(caught.value) for name in ("age", "sex", "y"))


def test_a_schema_that_cannot_work_tells_everything_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        TableSchema(
            columns=(
                Numeric("a", 2, 1),
                Numeric("b", 0, float("inf")),
                Categorical("c", ("x", "x")),
                Numeric("y", 0, 1),
            ),
            label=ClassLabel("y", (("no",), ("no",))),
            scale="z-score",
            missing_policy="mean",
            ignore=("a",),
            delimiter="",
        )
    message = str(caught.value)
    expected = ["'a': low = 2", "'b'", "'c': categories", "'y' is declared twice", "label 'y'", "scale is 'z-score'"]
    expected += ["missing_policy is 'mean'", "'a' is both declared and ignored", "delimiter is ''", "\nHINT: "]
    assert [part for part in expected if part not in message] == []
    with pytest.raises(ValueError, match="no feature column"):
        TableSchema((), LABEL)


def test_bins_and_crosses_are_one_hot_and_within_the_bound() -> None:
    schema = TableSchema(
        columns=(Numeric("age", 0, 100, bins=4), Numeric("gain", 0, 1000, log=True), Categorical("sex", ("F", "M"))),
        label=ClassLabel("y", (("0",), ("1",))),
        crosses=(("age", "sex"),),
        missing_policy="bucket",
    )
    columns = {
        "age": ["0", "24.9", "25", "100", ""],
        "gain": ["0", "0", "0", "1000", "0"],
        "sex": ["F", "M", "F", "", "M"],
    }
    x, _ = encode(RawTable(Path("t"), {**columns, "y": ["0"] * 5}, list(range(5))), schema)
    assert x.shape == (5, schema.width) and schema.width == 1 + 4 + 1 + 3 + 4 * 3
    parts, sexes = x[:, 1:5].argmax(1).tolist(), x[:, 6:9].argmax(1).tolist()
    assert parts == [0, 0, 1, 3, 2] and sexes == [0, 1, 0, 2, 1]
    assert x[:, 9:].argmax(1).tolist() == [3 * part + sex for part, sex in zip(parts, sexes, strict=True)]
    assert (x[:, 9:].sum(1) == 1).all()
    assert schema.input_bound == math.sqrt(5), "attained by the row with every number at its end"
    assert float(x.norm(dim=1).max()) == pytest.approx(schema.input_bound)


def test_expanded_cuts_every_number_and_crosses_every_pair() -> None:
    plain = TableSchema(
        columns=(Numeric("a", 0, 1), Categorical("b", ("x", "y")), Categorical("c", ("u", "v", "w"))),
        label=ClassLabel("y", (("0",), ("1",))),
    )
    assert expanded(plain, crosses=True).crosses == (("b", "c"),)
    both = expanded(plain, bins=3, crosses=True)
    assert both.crosses == (("a", "b"), ("a", "c"), ("b", "c"))
    assert both.width == 4 + 2 + 3 + 6 + 9 + 6 and both.input_bound == math.sqrt(2 + 1 + 1 + 3)


@pytest.mark.parametrize(
    "crosses, message",
    [((("a", "b"),), "'a' is a number without bins"), ((("b", "z"),), "not a pair"), ((("b", "b"),), "not a pair")],
)
def test_impossible_crosses_are_refused(crosses: tuple[tuple[str, str], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TableSchema(
            columns=(Numeric("a", 0, 1), Categorical("b", ("x", "y"))),
            label=ClassLabel("y", (("0",), ("1",))),
            crosses=crosses,
        )


@pytest.mark.parametrize("bins", [1, -2, 2.5, True])
def test_impossible_bins_are_refused(bins: object) -> None:
    with pytest.raises(ValueError, match="bins is"):
        TableSchema(columns=(Numeric("a", 0, 1, bins=bins),), label=ClassLabel("y", (("0",), ("1",))))  # type: ignore
