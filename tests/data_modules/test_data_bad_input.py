"""Bad files as a user meets them: `lipdp fit` says in one line which file and row, exits with 2, and writes nothing."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml

from lipdp_lightning.cli import main

SCHEMA = """
rows: 40
columns: [{name: age, low: 0, high: 100}, {name: sex, categories: [F, M]}]
label: {name: y, values: ["0", "1"]}
"""
HEADER = "age,sex,y"
ROWS = [f"{i},{'FM'[i % 2]},{i % 2}" for i in range(40)]

TABLES = {
    "ragged row": ([HEADER, *ROWS[:5], "5,F", *ROWS[6:]], "people.csv, row 7: 2 fields where 3 are declared"),
    "unknown category": (
        [HEADER, *ROWS[:5], "5,X,0", *ROWS[6:]],
        "row 7, column 'sex': 'X' is not a declared",
    ),
    "NaN": ([HEADER, *ROWS[:5], "nan,F,0", *ROWS[6:]], "row 7, column 'age': 'nan' is not a finite number"),
    "missing value": ([HEADER, *ROWS[:5], ",F,0", *ROWS[6:]], "row 7, column 'age': the value is missing"),
    "label": ([HEADER, *ROWS[:5], "5,F,2", *ROWS[6:]], "row 7, column 'y': label '2' is not one of the declared"),
    "empty": ([], "people.csv is empty"),
    "no rows": ([HEADER], "people.csv has no rows"),
    "JSON": (['{"age": 5}'], "people.csv, header: declared column 'age' is missing"),
    "zero byte": ([HEADER, *ROWS[:5], "5,F\0,0", *ROWS[6:]], "people.csv, row 7: a zero byte"),
    "row of two lines": ([HEADER, *ROWS[:5], '5,"F', 'M",0', *ROWS[6:]], "row 7, column 'sex': 'F"),
    "duplicate column": (["age,age,sex,y", *(f"1,{r}" for r in ROWS)], "header: column 'age' appears twice"),
    "an HTML page": (["<!DOCTYPE html>", "<p>log in</p>"], "people.csv is an HTML page"),
    "too few rows": ([HEADER, *ROWS[:20]], "people.csv: 40 rows are declared and fewer exist"),
}


def configuration(folder: Path, data: dict[str, object], features: int) -> Path:
    content = {
        "model": {
            "network": {
                "class_path": "lipdp_lightning.models.MLP",
                "init_args": {"input_shape": [features], "outputs": 1},
            },
            "loss": "binary_cross_entropy",
        },
        "data": data,
        "privacy": {"noise_multiplier": 2.0, "steps": 2, "batch_size": 10, "delta": 1e-3},
        "trainer": {"accelerator": "cpu", "devices": 1},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder / "config.yaml"


def refused(folder: Path, config: Path, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config", str(config), "--run_dir", str(folder / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lipdp fit: ") and message in error and "HINT: " in error and "Traceback" not in error
    problem = [line for line in error.splitlines() if message in line]
    assert len(problem) == 1 and not (folder / "run").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TABLES)
def test_a_bad_table(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, message = TABLES[name]
    (tmp_path / "people.csv").write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    files = {"path": str(tmp_path / "people.csv"), "schema": str(tmp_path / "schema.yaml")}
    data = {"class_path": "data_modules.CSVTable", "init_args": files}
    refused(tmp_path, configuration(tmp_path, data, 3), message, capsys)


def archive(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    np.savez(path, x=x, y=y)


def changed(index: int, value: float) -> np.ndarray:
    array = np.zeros((40, 3))
    array[index, 1] = value
    return array


LABELS = np.arange(40) % 2
FILES = {
    "NaN in an array": (
        lambda p: archive(p, changed(8, np.nan), LABELS),
        "a.npz, training rows: row 8, column 1",
    ),
    "label in an array": (
        lambda p: archive(p, changed(0, 0.5), np.where(np.arange(40) == 9, 7, LABELS)),
        "a.npz, training rows: row 9 has label 7",
    ),
    "text": (lambda p: p.write_text("x,y\n"), "a.npz is not a zip archive"),
    "gzip": (lambda p: p.write_bytes(gzip.compress(b"x")), "a.npz is a gzip file"),
    "other zip": (lambda p: zipfile.ZipFile(p, "w").writestr("readme", "x"), "a.npz has no arrays x and y"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
def test_a_bad_array_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write, message = FILES[name]
    write(tmp_path / "a.npz")
    options = {"path": str(tmp_path / "a.npz"), "declared_size": 40, "input_shape": [3], "task": "binary"}
    data = {"class_path": "data_modules.NpzArrays", "init_args": {**options, "low": -1.0, "high": 1.0}}
    refused(tmp_path, configuration(tmp_path, data, 3), message, capsys)


@pytest.mark.filterwarnings("ignore")
def test_a_published_file_of_another_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "tabular" / "nursery" / "nursery.data"
    place.parent.mkdir(parents=True)
    place.write_text("usual,proper,complete,1,convenient,convenient,nonprob,recommended,recommend\n" * 12_960)
    data = {"class_path": "data_modules.Nursery", "init_args": {"root": str(tmp_path), "download": True}}
    refused(tmp_path, configuration(tmp_path, data, 27), "nursery.data has the SHA-256", capsys)
    assert place.is_file()


@pytest.mark.filterwarnings("ignore")
def test_a_target_outside_the_declared_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "people.csv").write_text("\n".join([HEADER, *ROWS[:5], "5,F,1.5", *ROWS[6:]]))
    schema = yaml.safe_load(SCHEMA) | {"label": {"name": "y", "low": 0, "high": 1}}
    files = {"path": str(tmp_path / "people.csv"), "schema": schema}
    config = configuration(tmp_path, {"class_path": "data_modules.CSVTable", "init_args": files}, 3)
    config.write_text(config.read_text().replace("binary_cross_entropy", "huber"))
    refused(tmp_path, config, "row 7, column 'y': target 1.5 is outside the declared [0, 1]", capsys)


@pytest.mark.filterwarnings("ignore")
def test_a_picture_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "1.png").write_text("no picture")
    options = {"path": str(tmp_path / "photos"), "classes": ["cat", "dog"], "declared_size": 20, "size": [2, 2]}
    data = {"class_path": "data_modules.ImageFolder", "init_args": options}
    refused(tmp_path, configuration(tmp_path, data, 12), "cat/1.png: not an image", capsys)


@pytest.mark.filterwarnings("ignore")
def test_another_unit_than_the_data_declares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "people.csv").write_text("\n".join(["id,age,sex,y", *(f"{i % 20},{r}" for i, r in enumerate(ROWS))]))
    (tmp_path / "schema.yaml").write_text(SCHEMA + "group: {column: id, max_rows: 2}\n")
    files = {"path": str(tmp_path / "people.csv"), "schema": str(tmp_path / "schema.yaml")}
    config = configuration(tmp_path, {"class_path": "data_modules.CSVTable", "init_args": files}, 3)
    content = yaml.safe_load(config.read_text())
    content["privacy"]["max_examples_per_unit"] = 5
    config.write_text(yaml.safe_dump(content))
    refused(tmp_path, config, "max_examples_per_unit is 5, and the data module bounds a group to 2", capsys)


@pytest.mark.filterwarnings("ignore")
def test_curves_of_single_rows_where_a_group_is_protected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "people.csv").write_text("\n".join(["id,age,sex,y", *(f"{i % 40},{r}" for i, r in enumerate(ROWS))]))
    (tmp_path / "schema.yaml").write_text(SCHEMA + "group: {column: id, max_rows: 2, sampling: groups}\n")
    files = {"path": str(tmp_path / "people.csv"), "schema": str(tmp_path / "schema.yaml")}
    config = configuration(tmp_path, {"class_path": "data_modules.CSVTable", "init_args": files}, 3)
    content = yaml.safe_load(config.read_text())
    content["trainer"] |= {
        "callbacks": [{"class_path": "callbacks.PrivateValidationCurves", "init_args": {"epsilon": 1.0}}],
        "limit_val_batches": 0,
    }
    config.write_text(yaml.safe_dump(content))
    assert main(["fit", "--config", str(config), "--run_dir", str(tmp_path / "run"), "--wandb", "off"]) == 2
    assert "a curve's noise covers one row, and the plan protects a group" in capsys.readouterr().err
