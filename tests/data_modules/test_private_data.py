"""PrivateData.of: what it takes, what it asks for, and that its refusals show no private value and no private size."""

from __future__ import annotations

import datetime
import io
import re
import tarfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lipdp_lightning
from lipdp_lightning.data_modules import CSVTable, Declaration, PrivateData, PrivateDataModule
from lipdp_lightning.data_modules.placeholders import FILL_IN

ROWS = 137
DECLARED: dict[str, Any] = {
    "rows": ROWS,
    "columns": [
        {"name": "age", "low": 0, "high": 100},
        {"name": "born", "date": "%Y-%m-%d", "low": "1900-01-01", "high": "2020-01-01"},
        {"name": "job", "categories": ["0", "1", ["two", "2"]]},
    ],
    "label": {"name": "y", "values": ["no", "yes"]},
}
IMAGES: dict[str, Any] = {"rows": 24, "shape": [3, 4, 5], "low": 0, "high": 255, "label": {"classes": 3}}


def columns(rows: int = ROWS) -> dict[str, list[Any]]:
    return {
        "age": [float(i % 90) for i in range(rows)],
        "born": [datetime.date(1950, 1, 1) + datetime.timedelta(days=i) for i in range(rows)],
        "job": [i % 3 for i in range(rows)],
        "y": [("no", "yes")[i % 2] for i in range(rows)],
    }


def with_group(rows: int = ROWS) -> dict[str, list[Any]]:
    return columns(rows) | {"patient": [i // 4 for i in range(rows)]}


def encoded(module: PrivateDataModule) -> list[Any]:
    return [part.tolist() if isinstance(part, torch.Tensor) else list(part) for part in module.load_train()]


# ---- what it takes


def test_it_is_also_a_name_of_the_library() -> None:
    assert lipdp_lightning.PrivateData is PrivateData and lipdp_lightning.Declaration is Declaration
    with pytest.raises(AttributeError, match="no attribute 'PublicData'"):
        _ = lipdp_lightning.PublicData


def test_a_mapping_records_and_a_structured_array_are_one_table() -> None:
    table = columns()
    records = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    kinds = [("age", "f8"), ("born", "M8[D]"), ("job", "i4"), ("y", "U3")]
    structured = np.array([tuple(row.values()) for row in records], dtype=kinds)
    expected = encoded(PrivateData.of(table, DECLARED))
    assert np.array(expected[0]).shape == (ROWS, 5) and sum(expected[1]) == ROWS // 2
    assert encoded(PrivateData.of(records, DECLARED)) == encoded(PrivateData.of(structured, DECLARED)) == expected


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow", "datasets"])
def test_a_frame_of_another_library_is_the_same_table(library: str) -> None:
    """Run where the package is installed; it is an extra of this one."""
    package = pytest.importorskip(library)
    make = {
        "pandas": lambda: package.DataFrame(columns()),
        "polars": lambda: package.DataFrame(columns()),
        "pyarrow": lambda: package.table(columns()),
        "datasets": lambda: package.Dataset.from_dict(columns()),
    }
    frame = make[library]()
    module = PrivateData.of(frame, DECLARED)
    assert encoded(module) == encoded(PrivateData.of(columns(), DECLARED))
    module.setup()
    assert module.dataset_size == round(0.8 * ROWS) and module.val_dataloader()
    with pytest.raises(ValueError, match=r"column 'age' is to be filled in(.|\n)*rows: FILL_IN"):
        PrivateData.of(frame)
    if library == "polars":
        assert encoded(PrivateData.of(frame.lazy(), DECLARED)) == encoded(module)
        schema = Declaration.from_public(frame.schema, label="y")
        assert schema.content["columns"][0] == {"name": "age", "low": FILL_IN, "high": FILL_IN}
    if library == "pyarrow":
        schema = Declaration.from_public(frame.schema, label="y")
        assert schema.content["columns"][1]["date"] == "%Y-%m-%d"
    if library == "pandas":
        frame["job"] = frame["job"].astype("category")
        frame.loc[5, "age"] = float("nan")
        with pytest.raises(ValueError, match=r"DataFrame, training rows, row 5, column 'age': the value is missing"):
            PrivateData.of(frame, DECLARED).setup()
        twice = package.concat([frame, frame[["age"]]], axis=1)
        with pytest.raises(ValueError, match="column 'age' appears twice"):
            PrivateData.of(twice, DECLARED)


def test_files_are_recognised_by_their_ends(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("age,born,job,y\n" + "1,1950-01-01,2,no\n" * ROWS)
    module = PrivateData.of(tmp_path / "t.csv", DECLARED)
    assert isinstance(module, CSVTable) and len(encoded(module)[0]) == ROWS
    with pytest.raises(ValueError, match=r"column .born. is to be filled in"):
        PrivateData.of(tmp_path / "t.csv")
    for given_, message in [
        ("t.xlsx", "no ending of a known file"),
        ({"a": 1}, "holds several tables, or no columns"),
        (5, "int holds no rows"),
        (np.ones(3), "without labels"),
    ]:
        with pytest.raises(ValueError, match=rf"{message}.*\nHINT: "):
            PrivateData.of(given_, DECLARED)


def test_a_parquet_file_is_the_same_table(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns()), tmp_path / "t.parquet")
    assert encoded(PrivateData.of(tmp_path / "t.parquet", DECLARED)) == encoded(PrivateData.of(columns(), DECLARED))


def test_arrays_and_datasets_are_the_same_rows() -> None:
    x, y = np.arange(24 * 60).reshape(24, 3, 4, 5) % 256, np.arange(24) % 3
    expected = encoded(PrivateData.of((x.astype(np.uint8), y), IMAGES))
    same: list[Any] = [
        (x, y),
        (x.astype(np.float32), y.astype(float)),
        (torch.tensor(x), torch.tensor(y)),
        torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y)),
        [(row, str(label)) for row, label in zip(x, y, strict=True)],
    ]
    for source in same:
        assert encoded(PrivateData.of(source, IMAGES)) == expected
    module = PrivateData.of((x, y), IMAGES)
    module.setup()
    batch = next(iter(module.val_dataloader()))[0]
    moved = module.transform_batch(batch)
    assert batch.dtype == torch.uint8 and moved.min() >= -1 and moved.max() <= 1
    assert moved.flatten(1).norm(dim=1).max() <= module.input_bound == pytest.approx(60**0.5)


def test_columns_are_not_declared_by_a_shape() -> None:
    with pytest.raises(ValueError, match=r"has columns, and a shape is declared\nHINT"):
        PrivateData.of(columns(), IMAGES)
    with pytest.raises(ValueError, match="'shape' is missing"):
        PrivateData.of((np.ones((3, 2)), np.ones(3)), DECLARED)


def test_a_range_of_its_own_for_every_number_and_a_number_as_target() -> None:
    declared = {"rows": 40, "shape": 2, "low": [0, -10], "high": [1, 10], "label": {"low": 0, "high": 8}}
    x = np.stack([np.linspace(-1, 2, 40), np.linspace(-10, 10, 40)], axis=1)
    module = PrivateData.of((x, np.linspace(0, 8, 40)), declared)
    rows, y = module.load_train()[:2]
    assert rows.min() == -1 and rows.max() == 1 and (y.min(), y.max()) == (-1, 1)
    assert rows[:, 1].tolist() == pytest.approx(np.linspace(-1, 1, 40).tolist(), abs=1e-6)
    assert module.task == "regression" and "a range of its own" in module.describe()


def test_a_torchvision_dataset_with_images(tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision")
    data = torchvision.datasets.FakeData(24, (3, 4, 5), 3)
    module = PrivateData.of(data, IMAGES)
    module.setup()
    assert module.made_up_batch(2)[0].shape == (2, 3, 4, 5)
    with pytest.raises(ValueError, match=r"row 0 is an image of another size; resize: true.*\nHINT"):
        PrivateData.of(data, IMAGES | {"shape": [3, 8, 8]}).setup()
    assert PrivateData.of(data, IMAGES | {"shape": [1, 8, 8], "resize": True}).load_train()[0].shape == (24, 1, 8, 8)


def test_a_hugging_face_dataset_of_images() -> None:
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    pictures = [Image.open(io.BytesIO(picture(n))) for n in range(24)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(3)})
    data = datasets.Dataset.from_dict({"image": pictures, "label": [n % 3 for n in range(24)]}, features=features)
    declared = IMAGES | {"features": "image", "label": {"name": "label", "classes": 3}}
    x, y = encoded(PrivateData.of(data, declared))
    assert [row[0][0][0] for row in x] == list(range(24)) and y == [n % 3 for n in range(24)]
    with pytest.raises(ValueError, match=r"row 0 has no field 'img'\nHINT"):
        PrivateData.of(data, declared | {"features": "img"}).setup()
    with pytest.raises(ValueError, match="holds several tables"):
        PrivateData.of(datasets.DatasetDict({"train": data}), DECLARED)


def test_a_dataset_that_draws_at_random_is_refused() -> None:
    class Random(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> Any:
            return torch.randint(0, 255, (3, 4, 5)), index % 3

    with pytest.raises(ValueError, match=r"another one when it is read again\nHINT: leave random transforms out"):
        PrivateData.of(Random(), IMAGES).setup()


def tar(path: Path, records: list[dict[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for number, record in enumerate(records):
            for field, content in record.items():
                member = tarfile.TarInfo(f"part/{path.stem}{number:03d}.{field}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def picture(number: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.full((4, 5, 3), number, dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


SHARDS = IMAGES | {"features": "png", "label": {"name": "cls", "classes": 3}}


def test_shards_are_read_as_webdataset_writes_them(tmp_path: Path) -> None:
    records = [{"png": picture(n), "cls": str(n % 3).encode(), "id": str(n // 2).encode()} for n in range(24)]
    tar(tmp_path / "a-000.tar", records[:10])
    tar(tmp_path / "a-001.tar", records[10:])
    module = PrivateData.of(tmp_path / "a-{000..001}.tar", SHARDS)
    x, y = encoded(module)
    assert [row[0][0][0] for row in x] == list(range(24)) and y == [n % 3 for n in range(24)]
    grouped = PrivateData.of(tmp_path / "a-{000..001}.tar", SHARDS | {"rows": 12}, group="id", max_rows=2)
    assert encoded(grouped)[2] == [str(n // 2) for n in range(24)] and grouped.unit == "group"
    tar(tmp_path / "b.tar", [{**records[0], "png": b"\x89PNG and no more"}])
    for path, message in [("b.tar", "member part/b000.png: not what"), ("c.tar", "there is no file")]:
        with pytest.raises(ValueError, match=rf"{message}.*\nHINT"):
            PrivateData.of(tmp_path / path, SHARDS).setup()
    (tmp_path / "d.tar").write_bytes(b"no tar")
    with pytest.raises(ValueError, match=r"d\.tar is not a tar file"):
        PrivateData.of(tmp_path / "d.tar", SHARDS).setup()


def test_shards_that_webdataset_itself_wrote(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "w.tar")) as writer:
        for n in range(24):
            writer.write({"__key__": f"{n:04d}", "png": np.full((4, 5, 3), n, dtype=np.uint8), "cls": n % 3})
    ours = encoded(PrivateData.of(tmp_path / "w.tar", SHARDS))
    assert [row[0][0][0] for row in ours[0]] == list(range(24)) and ours[1] == [n % 3 for n in range(24)]
    theirs = webdataset.WebDataset(str(tmp_path / "w.tar"), shardshuffle=False).decode("pil").to_tuple("png", "cls")
    assert encoded(PrivateData.of(theirs, IMAGES)) == ours


# ---- what it asks for


def test_everything_that_is_missing_is_asked_for_at_once_with_a_declaration_to_start_from() -> None:
    with pytest.raises(ValueError) as caught:
        PrivateData.of(with_group())
    text = str(caught.value)
    for name in ("age", "born", "job", "y", "patient"):
        assert (
            f"column '{name}' is to be filled in: " in text and f"{{name: {name}, kind: FILL_IN}}" in text
        ) or name == "y"
    assert "rows is to be filled in" in text and "label is to be filled in" in text and text.count("HINT: ") == 8
    assert str(ROWS) not in text
    with pytest.raises(ValueError, match=r"group\.max_rows is to be filled in(.|\n)*column 'born' is not declared"):
        undeclared = {**DECLARED, "columns": DECLARED["columns"][:1]}
        PrivateData.of(with_group(), undeclared, group="patient")
    with pytest.raises(ValueError, match="shape"):
        PrivateData.of(torch.utils.data.TensorDataset(torch.ones(3), torch.ones(3)))
    with pytest.raises(ValueError, match=r"shape: \[4, 5\]"):
        PrivateData.of((np.ones((3, 4, 5)), np.ones(3)))


def test_groups_are_declared_by_one_argument() -> None:
    module = PrivateData.of(with_group(), DECLARED | {"rows": 35}, group="patient", max_rows=3)
    module.setup()
    assert (module.unit, module.max_examples_per_unit, module.samples_groups) == ("group", 1, True)
    assert "35 groups declared" in module.describe() and "by a public hash of each group's name" in module.describe()
    by_rows = PrivateData.of(
        with_group(), DECLARED | {"rows": 103}, group="patient", max_rows=3, sampling="rows", validation_fraction=0.0
    )
    by_rows.setup()
    assert (by_rows.rows, by_rows.max_examples_per_unit) == (34 * 3 + 1, 3)
    with pytest.raises(ValueError, match="max_rows is given without a group"):
        PrivateData.of(columns(), DECLARED, max_rows=3)
    in_arrays = {"rows": 12, "shape": 1, "low": 0, "high": 1, "label": {"classes": 2}}
    arrays = (np.linspace(0, 1, 24)[:, None], np.arange(24) % 2, [f"p{n // 2}" for n in range(24)])
    assert PrivateData.of(arrays, in_arrays, group="patient", max_rows=2).load_train()[2] == list(arrays[2])


def test_a_declaration_suggested_by_the_private_rows_themselves_is_refused() -> None:
    table = columns()
    suggested = Declaration.from_public(table, label="y").declare(rows=ROWS)
    with pytest.raises(ValueError, match="suggested by the private rows themselves"):
        PrivateData.of(table, suggested)
    PrivateData.of(columns(), suggested)  # another object: nobody can know whether it is public


def test_held_out_rows_of_a_second_table() -> None:
    module = PrivateData.of(columns(), DECLARED, heldout=columns(20))
    module.setup()
    assert module.dataset_size == ROWS and len(module.test_dataloader().dataset) == 20


# ---- what it refuses


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "nan": ({"age": [float("nan")] * ROWS}, {}, "row 0, column 'age': the value is missing"),
    "infinite": ({"age": [float("-inf")] * ROWS}, {}, "column 'age': the value is not a finite number"),
    "mixed": ({"age": [1, "2.5", [3], *range(ROWS - 3)]}, {}, "row 2, column 'age': the value is not a number"),
    "level": ({"job": ["0"] * 130 + ["astronaut"] * 7}, {}, "row 130, column 'job': the value is not a declared"),
    "large": ({"job": [1e17] * ROWS}, {}, r"column 'job': the value is a float beyond 2\^53"),
    "date": ({"born": ["12/24/1990"] * ROWS}, {}, "column 'born': the value is not a date of the declared form"),
    "label": ({"y": ["maybe"] * ROWS}, {}, "column 'y': the label is not one of the declared classes"),
    "missing label": ({"y": [None] * ROWS}, {}, "column 'y': the value is missing"),
    "fewer": (columns(90), {}, "137 rows are declared and fewer exist"),
    "more": (columns(211), {}, "137 rows are declared and more exist"),
    "empty": (columns(0), {}, "has no rows"),
    "one row": (columns(1), {"rows": 1}, "the split holds out"),
    "undeclared": ({"x": [1] * ROWS}, {}, "column 'x' is not declared"),
    "no column": (None, {"label": {"name": "z", "values": ["a", "b"]}}, "declared column 'z' is missing"),
    "no group": ({"p": [None] * ROWS}, {"group": {"column": "p", "max_rows": 2}}, "column 'p': the group is missing"),
    "float group": ({"p": [1e18] * ROWS}, {"group": {"column": "p", "max_rows": 2}}, "'p': the value is a float"),
    "large group": (
        {"p": [7] * ROWS}, {"group": {"column": "p", "max_rows": 2, "excess": "refuse"}},
        "a p has more rows than the 2 that are declared",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_table_is_one_teaching_line_without_a_value_or_a_size(case: str) -> None:
    change, declared, message = BAD[case]
    with pytest.raises(ValueError, match=message) as caught:
        PrivateData.of({**columns(), **change} if change else columns(), DECLARED | declared).setup()
    first, *hint = str(caught.value).split("\n")
    assert len(hint) == 1 and hint[0].startswith("HINT: ")
    for secret in ("astronaut", "maybe", "12/24", "2.5", "1e+17", "1e+18", "90 ", "211"):
        assert secret not in first


BAD_ARRAYS: dict[str, tuple[Any, str]] = {
    "nan": ((np.full((24, 3, 4, 5), np.nan), np.zeros(24)), "row 0 holds a number that is not finite"),
    "fractions": ((np.full((24, 3, 4, 5), 0.5), np.zeros(24)), "row 0 holds a number that is not whole"),
    "text": ((np.full((24, 3, 4, 5), "x"), np.zeros(24)), "row 0 does not hold numbers"),
    "shape": ((np.zeros((24, 4, 5, 3)), np.zeros(24)), r"row 0 does not have the declared shape \[3, 4, 5\]"),
    "label": ((np.zeros((24, 3, 4, 5)), [7] * 24), "row 0: the label is not one of the declared classes"),
    "labels": ((np.zeros((24, 3, 4, 5)), np.zeros((24, 2))), "row 0 has a label that is not a single value"),
    "lengths": ((np.zeros((24, 3, 4, 5)), np.zeros(17)), "the arrays have different numbers of rows"),
    "parts": ((np.zeros((24, 3, 4, 5)), np.zeros(24), np.zeros(24)), "3 arrays, and the declaration needs 2"),
    "empty": ((np.zeros((0, 3, 4, 5)), np.zeros(0)), "there are no rows"),
    "items": ([1] * 24, r"row 0 is not \(x, y\)"),
    "fewer": ((np.zeros((17, 3, 4, 5)), np.zeros(17)), "24 rows are declared and fewer exist"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_arrays_are_one_teaching_line_without_a_value_or_a_size(case: str) -> None:
    source, message = BAD_ARRAYS[case]
    with pytest.raises(ValueError, match=message) as caught:
        PrivateData.of(source, IMAGES).setup()
    assert re.fullmatch(r"[^\n]*\nHINT: [^\n]*", str(caught.value)) and "17" not in str(caught.value)


ANYTHING = st.sampled_from(
    [None, 3, "x", FILL_IN, [], [1], [{}], [{"name": [1]}], [{"name": "a", "low": {}}], {"name": {}}, {"a": 1}, 1.5,
     True, {"name": "y", "values": 3}, {"column": "p"}, [["a"]], [[]]]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["rows", "columns", "label", "group", "ignore", "aliases", "missing", "numbers", "crosses",
                         "encoding", "scale", "names", "delimiter", "shape", "low", "high", "x"]), ANYTHING, min_size=1,
    ),
    st.booleans(),
)  # fmt: skip
def test_a_declaration_that_is_none_is_refused_and_teaches(broken: dict[str, Any], grouped: bool) -> None:
    for base, source in ((DECLARED, columns()), (IMAGES, (np.zeros((24, 3, 4, 5)), np.zeros(24)))):
        try:
            PrivateData.of(source, base | broken, group="p" if grouped else None)
        except ValueError as error:
            assert "HINT: " in str(error), error


def test_what_a_dataset_raises_is_told_without_its_words() -> None:
    class Failing:
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> Any:
            raise KeyError("Anna Schmidt, 44")

    with pytest.raises(ValueError, match=r"row 0 cannot be read, KeyError\nHINT") as caught:
        PrivateData.of(Failing(), IMAGES).setup()
    assert "Anna" not in str(caught.value) and caught.value.__suppress_context__


SECRET = 918273645
CELLS = st.one_of(
    st.sampled_from(
        [SECRET, float(SECRET), -float(SECRET), str(SECRET), f"x{SECRET}", Decimal(SECRET), complex(SECRET)]
    ),
    st.sampled_from([[SECRET], {"a": SECRET}, (SECRET,), np.int64(SECRET), np.float32(1e30), str(SECRET).encode()]),
    st.sampled_from([None, float("nan"), float("inf"), np.datetime64("NaT"), datetime.datetime(1966, 6, 6), "", "?"]),
    st.sampled_from([0, 1, "0", "two", True, 44.0, "1966-06-06", "yes"]),
)


def told(work: Any) -> Iterator[str]:
    try:
        work().setup()
    except ValueError as error:
        yield str(error)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(["age", "born", "job", "y", "p"]), st.lists(CELLS, max_size=5)), st.booleans())
def test_no_table_brings_its_values_into_a_message(broken: dict[str, list[Any]], grouped: bool) -> None:
    """Whatever the cells, there is one teaching refusal or none, and it quotes none of them."""
    table = columns() | {"p": list(range(ROWS))}
    for name, cells in broken.items():
        table[name] = [*cells, *table[name][len(cells) :]]
    declared = DECLARED | ({"group": {"column": "p", "max_rows": 1}} if grouped else {"ignore": ["p"]})
    for text in told(lambda: PrivateData.of(table, declared)):
        assert text.count("\nHINT: ") == 1 and text.count("\n") == 1
        assert not re.search("918273|9.18e|1966|1e30|two", text)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(CELLS, CELLS), max_size=6))
def test_no_dataset_brings_its_values_into_a_message(items: list[Any]) -> None:
    declared = {"rows": 3, "shape": 1, "low": 0, "high": 1, "label": {"classes": 2}}
    for text in told(lambda: PrivateData.of(items, declared)):
        assert text.count("\nHINT: ") == 1 and not re.search("918273|9.18e|1966|1e30|two", text)
