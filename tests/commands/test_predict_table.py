"""Predictions for new rows of a table: declared names of classes, no label, and no private row that is read."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from command_runs import lipdp

from lipdp_lightning.data_modules.csv_table import CSVTable
from lipdp_lightning.data_modules.image_folder import ImageFolder
from lipdp_lightning.release import load_release

COLUMNS = [{"name": "age", "low": 0, "high": 100}, {"name": "job", "categories": ["clerk", "farmer"]}]
CLASSES = {"name": "bought", "values": ["no", "yes"]}
PRICE = {"name": "price", "low": 100, "high": 500}


def table(rows: int, label: Any = None) -> pd.DataFrame:
    dice = np.random.default_rng(rows)
    frame = pd.DataFrame({"age": dice.integers(0, 100, rows), "job": dice.choice(["clerk", "farmer"], rows)})
    if label == CLASSES:
        frame["bought"] = np.where(frame.age > 50, "yes", "no")
    elif label == PRICE:
        frame["price"] = 100 + 4 * frame.age
    return frame


def trained(folder: Path, label: dict[str, Any]) -> Path:
    """Trains for a few steps, and returns the run directory."""
    table(200, label).to_csv(folder / "private.csv", index=False)
    loss, shapes = "Huber" if "low" in label else "BinaryCrossEntropy", {"input_shape": None, "outputs": None}
    rows = {"rows": 200, "columns": COLUMNS, "label": label}
    config = {
        "model": {
            "network": {"class_path": "lipdp_lightning.models.MLP", "init_args": shapes},
            "loss": {"class_path": f"lipdp_lightning.bounds.losses.{loss}"},
            "input_bound": 2.0,
        },
        "data": {"class_path": "data_modules.CSVTable", "init_args": {
            "path": str(folder / "private.csv"), "schema": rows}},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "steps": 6, "batch_size": 50, "accountant": "rdp"},
        "trainer": {"accelerator": "cpu", "devices": 1},
    }  # fmt: skip
    (folder / "table.yaml").write_text(yaml.safe_dump(config))
    outcome = lipdp("fit", "--config", folder / "table.yaml", "--run_dir", folder / "run", "--wandb", "off")
    assert outcome.code == 0, outcome.err
    return folder / "run"


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("classes"), CLASSES)


@pytest.fixture(scope="module")
def release(classes: Path) -> Path:
    target = classes.parent / "model.pt"
    assert lipdp("export", "--run_dir", classes, "--output", target).code == 0
    return target


def read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def test_new_rows_need_no_label_and_get_the_declared_names(classes: Path, tmp_path: Path) -> None:
    table(30).to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / "out.csv"
    outcome = lipdp("predict", "--run_dir", classes, "--table", tmp_path / "new.csv", "--output", out)
    assert outcome.code == 0 and "30 rows of" in outcome.out, outcome.err
    rows = read(out)
    assert list(rows[0]) == ["row", "prediction", "prediction_name", "probability_no", "probability_yes"]
    assert [int(row["row"]) for row in rows] == list(range(30))
    for row in rows:
        shares = [float(row["probability_no"]), float(row["probability_yes"])]
        assert sum(shares) == pytest.approx(1) and int(row["prediction"]) == int(np.argmax(shares))
        assert row["prediction_name"] == ["no", "yes"][int(row["prediction"])]


def test_held_out_rows_have_the_names_of_their_targets(classes: Path, tmp_path: Path) -> None:
    assert lipdp("predict", "--run_dir", classes, "--output", tmp_path / "out.csv").code == 0
    rows = read(tmp_path / "out.csv")
    assert {(row["target"], row["target_name"]) for row in rows} == {("0", "no"), ("1", "yes")}


def test_a_release_predicts_without_the_private_rows(classes: Path, release: Path, tmp_path: Path) -> None:
    """A label in the new table is not read, whatever it holds, and a DataFrame gives what a file does."""
    frame = table(30)
    frame.assign(bought="perhaps").to_csv(tmp_path / "new.csv", index=False)
    private = classes.parent / "private.csv"
    private.rename(classes.parent / "elsewhere.csv")
    try:
        words = ["--table", tmp_path / "new.csv", "--output"]
        assert lipdp("predict", "--release", release, *words, tmp_path / "a.csv").code == 0
        assert lipdp("predict", "--run_dir", classes, *words, tmp_path / "b.csv").code == 0
        found = load_release(release).predict(frame)
    finally:
        (classes.parent / "elsewhere.csv").rename(private)
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()
    assert [row["prediction_name"] for row in read(tmp_path / "a.csv")] == list(found["prediction_name"])


def test_a_table_of_other_columns_is_refused(release: Path, tmp_path: Path) -> None:
    table(5).drop(columns="age").assign(size=1).to_csv(tmp_path / "new.csv", index=False)
    outcome = lipdp("predict", "--release", release, "--table", tmp_path / "new.csv", "--output", tmp_path / "o.csv")
    assert outcome.code == 2 and "'age' is missing" in outcome.err and "'size' is not declared" in outcome.err
    both = lipdp("predict", "--release", release, "--table", "x", "--rows", "test", "--output", tmp_path / "o.csv")
    assert both.code == 2 and "--table and --rows" in both.err


def test_training_rows_need_their_label(classes: Path, tmp_path: Path) -> None:
    table(30).to_csv(tmp_path / "new.csv", index=False)
    option = ["--data.init_args.path", tmp_path / "new.csv"]
    outcome = lipdp("predict", "--run_dir", classes, *option, "--output", tmp_path / "out.csv")
    assert outcome.code == 2 and "'bought' is missing" in outcome.err


def test_a_regression_is_in_the_declared_units(tmp_path: Path) -> None:
    run = trained(tmp_path, PRICE)
    assert lipdp("predict", "--run_dir", run, "--output", tmp_path / "out.csv").code == 0
    rows = read(tmp_path / "out.csv")
    targets = {100.0 + 4 * age for age in range(100)}
    assert all(min(abs(float(row["target"]) - target) for target in targets) < 1e-3 for row in rows)
    assert np.mean([abs(float(row["prediction"]) - float(row["target"])) for row in rows]) < 250
    assert (
        lipdp("predict", "--run_dir", run, "--table", tmp_path / "private.csv", "--output", tmp_path / "b.csv").code
        == 0
    )
    assert list(read(tmp_path / "b.csv")[0]) == ["row", "prediction"]


def test_dropped_rows_are_left_out_and_the_others_keep_their_places(tmp_path: Path) -> None:
    schema = {"rows": 3, "columns": COLUMNS, "label": CLASSES, "missing": {"policy": "drop"}}
    data = CSVTable("nowhere.csv", schema)  # type: ignore[arg-type]
    (tmp_path / "new.csv").write_text("age,job\n1,clerk\n,farmer\n3,farmer\n")
    x, kept = data.features_of(str(tmp_path / "new.csv"))
    assert kept == [0, 2] and x.shape == (2, 3)
    torch.testing.assert_close(x[:, 0], torch.tensor([0.01, 0.03]))


def test_a_file_without_a_header_may_leave_the_label_out(tmp_path: Path) -> None:
    schema = {"rows": 3, "columns": COLUMNS, "label": CLASSES, "names": ["bought", "age", "job"]}
    data = CSVTable("nowhere.csv", schema)  # type: ignore[arg-type]
    for text in ("1,clerk\n2,farmer\n", "maybe,1,clerk\n?,2,farmer\n"):
        (tmp_path / "new.csv").write_text(text)
        x, kept = data.features_of(tmp_path / "new.csv")
        assert kept == [0, 1] and x.tolist() == [[pytest.approx(0.01), 1, 0], [pytest.approx(0.02), 0, 1]]


def test_classes_of_folders_have_their_names_and_numbers_have_none() -> None:
    assert ImageFolder("x", ["cat", "dog"], 10, [8, 8]).class_names == ("cat", "dog")
    numbers = {"rows": 3, "columns": COLUMNS, "label": {"name": "y", "values": ["0", "1"]}}
    assert CSVTable("nowhere.csv", numbers).class_names is None  # type: ignore[arg-type]
