"""Tables from CSV and Parquet by a schema: values, held-out rows, and every kind of bad file."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pytest
import torch

from lipdp_lightning.data_modules.csv_table import CSVTable, read_csv, read_table
from lipdp_lightning.data_modules.schema import ClassLabel, Numeric, TableSchema

SCHEMA = """
rows: 40
columns:
  - {name: age, low: 0, high: 100}
  - {name: sex, categories: [F, M]}
label: {name: y, values: ["no", "yes"]}
ignore: [id]
"""
HEADER = "id,age,sex,y"
ROWS = [f"{i},{i % 101},{'FM'[i % 2]},{['no', 'yes'][i % 3 == 0]}" for i in range(40)]


def write(folder: Path, lines: list[str], name: str = "people.csv", schema: str = SCHEMA) -> CSVTable:
    (folder / "schema.yaml").write_text(schema)
    text = "\n".join(lines) + "\n"
    (folder / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return CSVTable(str(folder / name), str(folder / "schema.yaml"), validation_fraction=0.0)


@pytest.mark.parametrize("name", ["people.csv", "people.csv.gz"])
def test_rows_arrive_encoded_and_in_order(name: str, tmp_path: Path) -> None:
    module = write(tmp_path, [HEADER, *ROWS], name)
    module.setup()
    assert module._train is not None
    assert module._train.x[:3].tolist() == [[0, 1, 0], [pytest.approx(0.01), 0, 1], [pytest.approx(0.02), 1, 0]]
    assert module._train.y.tolist() == [int(i % 3 == 0) for i in range(40)]
    assert (module.task, module.num_outputs, module.input_shape, module.dataset_size) == ("binary", 1, (3,), 40)


def test_column_order_blank_lines_spaces_and_quotes_do_not_matter(tmp_path: Path) -> None:
    plain = write(tmp_path, [HEADER, *ROWS])
    plain.setup()
    shuffled = ["y, sex, age, id ", ""]
    for row in ROWS:
        number, age, sex, y = row.split(",")
        shuffled += [f'"{y}", "{sex}", {age} ,{number}', ""]
    other = write(tmp_path, shuffled, "other.csv")
    other.setup()
    assert plain.fingerprint() == other.fingerprint()


def test_held_out_rows_by_hash_or_from_a_second_file(tmp_path: Path) -> None:
    write(tmp_path, [HEADER, *ROWS])
    paths = str(tmp_path / "people.csv"), str(tmp_path / "schema.yaml")
    hashed = CSVTable(*paths)
    hashed.setup()
    assert hashed.validation_fraction == 0.2 and hashed.rows + len(hashed._validation) == 40  # type: ignore[arg-type]
    (tmp_path / "later.csv").write_text("\n".join([HEADER, *ROWS[:7]]))
    published = CSVTable(*paths, heldout_path=str(tmp_path / "later.csv"))
    published.setup()
    assert published.rows == 40 and len(published._test) == 7  # type: ignore[arg-type]


def test_a_regression_table(tmp_path: Path) -> None:
    schema = SCHEMA.replace('values: ["no", "yes"]', "low: 0, high: 2")
    rows = [f"{i},{i},F,{i / 20}" for i in range(40)]
    module = write(tmp_path, [HEADER, *rows], schema=schema)
    module.setup()
    assert module.task == "regression" and module.target_bound == 1.0
    assert torch.allclose(module._train.y, torch.arange(40) / 20 - 1)  # type: ignore[union-attr]


def swapped(row: int, text: str) -> list[str]:
    return [HEADER, *ROWS[:row], text, *ROWS[row + 1 :]]


BAD_TABLES = {
    "ragged short": (swapped(4, "4,4,F"), "row 6: 3 fields where 4 are declared (1 such rows)"),
    "ragged long": (swapped(4, "4,4,F,no,no"), "row 6: 5 fields where 4"),
    "category": (swapped(9, "9,9,X,no"), "row 11, column 'sex': 'X' is not a declared category"),
    "nan": (swapped(9, "9,nan,F,no"), "row 11, column 'age': 'nan' is not a finite number"),
    "missing": (swapped(9, "9,,F,no"), "row 11, column 'age': the value is missing"),
    "label": (swapped(9, "9,9,F,perhaps"), "row 11, column 'y': label 'perhaps'"),
    "no rows": ([HEADER], "has no rows"),
    "blank": (["", ""], "has no rows"),
    "duplicate": ([HEADER.replace("id", "age"), *ROWS], "header: column 'age' appears twice"),
    "undeclared": ([HEADER.replace("id", "zip"), *ROWS], "header: column 'zip' is not declared"),
    "absent": ([HEADER.replace("age", "years"), *ROWS], "declared column 'age' is missing; column 'years' is not"),
    "delimiter": ([line.replace(",", ";") for line in (HEADER, *ROWS)], "declared column 'age' is missing"),
    "quotes": (swapped(4, '4,"4"4,F,no'), "row 6"),
    "open quote": (swapped(4, '4,"4,F,no'), "row 6: "),
    "size": ([HEADER, *ROWS[:30]], "40 rows are declared and fewer exist"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_a_bad_table_is_refused_with_file_row_and_column(case: str, tmp_path: Path) -> None:
    lines, message = BAD_TABLES[case]
    with pytest.raises(ValueError) as caught:
        write(tmp_path, lines).setup()
    first, hint = str(caught.value).split("\n")
    assert message in first and hint.startswith("HINT: ")
    assert "people.csv" in first or case == "size"


def test_row_numbers_count_lines_of_the_file(tmp_path: Path) -> None:
    lines = ["# a remark", HEADER, "", ROWS[0], '1,1,"F\n",no', "x,old,F,no"]
    module = write(tmp_path, lines, schema=SCHEMA + 'comment: "#"\n')
    with pytest.raises(ValueError, match=r"people\.csv, row 7, column 'age': 'old'"):
        module.setup()


@pytest.mark.parametrize("name", ["people.csv", "people.parquet", "people.csv.gz"])
def test_a_picture_by_the_name_of_a_table(name: str, tmp_path: Path) -> None:
    module = write(tmp_path, [HEADER, *ROWS])
    (tmp_path / name).write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(30))
    module.source = tmp_path / name
    with pytest.raises(ValueError, match=r"a PNG image"):
        module.setup()


@pytest.mark.parametrize("name", ["gone.csv", "gone.csv.gz", "gone.parquet"])
def test_a_missing_table(name: str, tmp_path: Path) -> None:
    module = write(tmp_path, [HEADER, *ROWS])
    module.source = tmp_path / name
    with pytest.raises(ValueError, match=rf"no file .*{name}\nHINT"):
        module.setup()


def test_a_file_without_header_and_its_ignored_columns(tmp_path: Path) -> None:
    schema = TableSchema(
        (Numeric("b", 0, 1),), ClassLabel("y", (("0",), ("1",))), names=("a", "b", "y"), ignore=("a",), delimiter=" "
    )
    (tmp_path / "t.data").write_text("7  0.5 1\n8 0.25  0\n")
    raw = read_csv(tmp_path / "t.data", schema)
    assert raw.columns["b"] == ["0.5", "0.25"] and raw.lines == [1, 2]


def test_description_lists_every_declared_column(tmp_path: Path) -> None:
    text = write(tmp_path, [HEADER, *ROWS]).describe()
    assert "age in [0, 100]; sex: 2 categories" in text and "label y: no, yes" in text


def test_parquet_without_pyarrow_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "pyarrow.parquet"):  # as if it were not there, wherever it is
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and so on PAR1")
    schema = TableSchema((Numeric("b", 0, 1),), ClassLabel("y", (("0",), ("1",))))
    with pytest.raises(ValueError, match=r"t\.parquet needs pyarrow, which is .*HINT: .*lipdp-lightning\[parquet\]"):
        read_table(tmp_path / "t.parquet", schema)


def test_a_parquet_file_that_was_cut_off_is_told_without_pyarrow(tmp_path: Path) -> None:
    schema = TableSchema((Numeric("b", 0, 1),), ClassLabel("y", (("0",), ("1",))))
    for content, message in ((b"PAR1 and so", "a damaged Parquet file: its end is missing"), (b"", "empty")):
        (tmp_path / "t.parquet").write_bytes(content)
        with pytest.raises(ValueError, match=rf"t\.parquet is {message}\nHINT"):
            read_table(tmp_path / "t.parquet", schema)


def test_parquet_gives_the_rows_of_the_csv(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    plain = write(tmp_path, [HEADER, *ROWS])
    plain.setup()
    columns = list(zip(*(row.split(",") for row in ROWS), strict=True))
    content = {
        "id": [int(v) for v in columns[0]],
        "age": [float(v) for v in columns[1]],
        "sex": list(columns[2]),
        "y": list(columns[3]),
    }
    parquet.write_table(pyarrow.table(content), tmp_path / "people.parquet")
    same = CSVTable(str(tmp_path / "people.parquet"), str(tmp_path / "schema.yaml"), validation_fraction=0.0)
    assert same.fingerprint() == plain.fingerprint()
    content["age"][5] = None  # type: ignore[call-overload]
    parquet.write_table(pyarrow.table(content), tmp_path / "people.parquet")
    with pytest.raises(ValueError, match=r"people\.parquet, row 6, column 'age': the value is missing"):
        CSVTable(str(tmp_path / "people.parquet"), str(tmp_path / "schema.yaml")).setup()
    whole = (tmp_path / "people.parquet").read_bytes()
    (tmp_path / "people.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"people\.parquet is a damaged Parquet file"):
        CSVTable(str(tmp_path / "people.parquet"), str(tmp_path / "schema.yaml")).setup()
