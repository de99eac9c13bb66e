"""Cells of tables: numbers, dates and categories as declared, each read by itself."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lipdp_lightning.data_modules import CSVTable
from lipdp_lightning.data_modules.table_cells import (
    ColumnProblem,
    NumberFormat,
    is_missing,
    parse_days,
    parse_numbers,
    text_of,
    texts,
)

GERMAN = NumberFormat(decimal=",", thousands=".")


@given(
    st.integers(-(10**15), 10**15),
    st.integers(0, 99),
    st.sampled_from([(",", "."), (".", ","), (",", " "), (",", "'")]),
)
def test_written_numbers_are_read_with_their_marks(whole: int, part: int, marks: tuple[str, str]) -> None:
    decimal, thousands = marks
    text = f"{abs(whole):,}".replace(",", thousands) + f"{decimal}{part:02d}"
    form = NumberFormat(decimal, thousands)
    expected = abs(whole) + part / 100
    assert parse_numbers([text, text.replace(thousands, "")], form).tolist() == pytest.approx([expected] * 2, rel=1e-15)


@pytest.mark.parametrize(
    "text", ["1.5", "1.23.456", "12.34,5", "1,2,3", "1.2345", ",5", "", "x", "1_000", "nan", "inf"]
)
def test_a_mark_in_the_wrong_place_is_no_number(text: str) -> None:
    with pytest.raises(ColumnProblem, match="is not a number"):
        parse_numbers(["1.234,5", text], GERMAN)


@pytest.mark.parametrize("form", [(",", ","), ("", ""), ("5", ""), (",", "-"), (",,", ".")])
def test_marks_that_cannot_be_told_apart_are_refused(form: tuple[str, str]) -> None:
    assert NumberFormat(*form).problems() and not GERMAN.problems()


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (1, "1"), (1.0, "1"), (np.float32(3), "3"), (np.int8(-4), "-4"), (Decimal("2.0"), "2"), (True, "True"),
        (np.bool_(False), "False"), (1.5, "1.5"), ("1.0", "1.0"), (datetime.date(2020, 1, 2), "2020-01-02"),
        (b" a ", "a"), (-0.0, "0"),
    ],
)  # fmt: skip
def test_a_whole_number_has_one_text_whatever_its_type(cell: Any, text: str) -> None:
    assert text_of(cell) == text


def test_a_float_that_does_not_tell_whole_numbers_apart_has_no_text() -> None:
    """2^53 and 2^53 + 1 are one float, so two patients would be one."""
    assert float(2**53) == float(2**53 + 1)
    with pytest.raises(ColumnProblem, match=r"beyond 2\^53"):
        texts([1.0, float(2**53)])
    assert texts([2**53, 2**53 + 1]) == [str(2**53), str(2**53 + 1)]


@pytest.mark.parametrize(
    "cell", [None, float("nan"), np.float32("nan"), np.datetime64("NaT"), Decimal("NaN"), "?", "", -1.0]
)
def test_missing_values_are_known_in_every_type(cell: Any) -> None:
    assert is_missing(cell, {"", "?", "-1"})
    assert not any(is_missing(other, {"", "?", "-1"}) for other in (0, "x", 1.5, 1e300, False))


def test_days_of_every_type_are_the_same() -> None:
    moments = ["02.01.2020", datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2), np.datetime64("2020-01-02")]
    assert len(set(parse_days(moments, "%d.%m.%Y"))) == 1
    hour = datetime.timezone(datetime.timedelta(hours=1))
    aware = datetime.datetime(2020, 1, 2, 1, tzinfo=hour)
    assert parse_days([aware], "") == parse_days([datetime.datetime(2020, 1, 2)], "")
    for wrong in ("2020-01-02", "32.01.2020", "", 7, 1.5, None):
        with pytest.raises(ColumnProblem, match="is not a date"):
            parse_days([wrong], "%d.%m.%Y")


@given(st.lists(st.one_of(st.integers(), st.floats(), st.booleans(), st.text(max_size=4), st.none()), min_size=1))
def test_a_cell_is_read_in_the_same_way_in_every_company(cells: list[Any]) -> None:
    """The fast path for whole columns and the path for single cells agree, so that no row changes another."""

    def alone(cell: Any) -> float | None:
        try:
            return float(parse_numbers([cell])[0])
        except ColumnProblem:
            return None

    good = [cell for cell in cells if alone(cell) is not None]
    assert parse_numbers(good).tolist() == [alone(cell) for cell in good]
    assert parse_numbers([*good, Decimal(1)]).tolist() == [*map(alone, good), 1.0]
    assert all(math.isfinite(value) for value in parse_numbers(good))


TABLE = (
    "patient;born;income;job;y\n1;31.12.1980;1.234,50;Clerk;yes\n2;01.01.1950;99;farmer;no\n"
    "3;15.06.1999;12.000;M\xfcller;YES\n"
)
SCHEMA = """
rows: 3
delimiter: ";"
encoding: latin-1
numbers: {decimal: ",", thousands: "."}
ignore: [patient]
columns:
  - {name: born, date: "%d.%m.%Y", low: 01.01.1950, high: 2000-01-01}
  - {name: income, low: 0, high: 12000}
  - {name: job, categories: [[clerk, Clerk], farmer, "M\xfcller"]}
label: {name: y, values: ["no", ["yes", "YES"]]}
"""


def table(folder: Path, text: str = TABLE) -> CSVTable:
    (folder / "t.csv").write_bytes(text.encode("latin-1"))
    (folder / "t.yaml").write_text(SCHEMA, encoding="utf-8")
    return CSVTable(str(folder / "t.csv"), str(folder / "t.yaml"), validation_fraction=0.0)


def test_a_table_of_another_country(tmp_path: Path) -> None:
    module = table(tmp_path)
    x, y = module.load_train()[:2]
    assert y.tolist() == [1, 0, 1]
    assert x[:, 2:].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert x[:, 1].tolist() == pytest.approx([1234.5 / 12000, 99 / 12000, 1])
    assert x[1, 0] == 0 and 0 < x[0, 0] < x[2, 0] < 1
    assert "born in [1950-01-01, 2000-01-01]" in module.describe()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "31.12.1980",
            "1980-12-31",
            r"row 2, column 'born': '1980-12-31' is not a date of the declared form '%d.%m.%Y'",
        ),
        ("1.234,50", "1,234.50", r"row 2, column 'income': '1,234.50' is not a number with the declared marks"),
        ("farmer", "Farmer", r"row 3, column 'job': 'Farmer' is not a declared category"),
        ("99;farmer", "99;9;farmer", r"row 3: 6 fields where 5 are declared"),
    ],
)
def test_a_malformed_row_is_one_line_with_file_and_row(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^.*t\.csv, {message}[^\n]*\nHINT: [^\n]*$"):
        table(tmp_path, TABLE.replace(old, new)).setup()


def test_text_in_another_encoding_is_refused_with_its_row(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(TABLE.encode("latin-1"))
    (tmp_path / "t.yaml").write_text(SCHEMA.replace("encoding: latin-1\n", ""), encoding="utf-8")
    with pytest.raises(ValueError, match=r"row 4: not UTF-8 text\nHINT: .*`encoding`"):
        CSVTable(str(tmp_path / "t.csv"), str(tmp_path / "t.yaml")).setup()
    with pytest.raises(ValueError, match="encoding is 'klingon', not one that Python knows"):
        (tmp_path / "t.yaml").write_text(SCHEMA.replace("latin-1", "klingon"), encoding="utf-8")
        CSVTable(str(tmp_path / "t.csv"), str(tmp_path / "t.yaml"))
