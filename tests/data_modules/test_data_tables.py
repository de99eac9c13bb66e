"""The named tables: on generated files in each one's own format, and on the real files under LIPDP_DATA."""

from __future__ import annotations

import gzip
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import lipdp_lightning.data_modules as tables
from lipdp_lightning.data_modules.benchmark_tables import NamedTable
from lipdp_lightning.data_modules.schema import ClassLabel, Numeric, TableSchema

needs_data = pytest.mark.skipif(not os.environ.get("LIPDP_DATA"), reason="LIPDP_DATA is not set")
ROWS = 60

# name, options, task, number of rows and of each class in the files' published form, held-out rows
REAL = [
    ("Adult", {}, "binary", 32561, [24720, 7841], 16281),
    ("Android", {}, "binary", 20531, [10270, 10261], None),
    ("BreastCancer", {}, "binary", 569, [357, 212], None),
    ("CaliforniaHousing", {}, "regression", 20640, None, None),
    ("DefaultCredit", {}, "binary", 30000, [23364, 6636], None),
    ("Dropout", {}, "classification", 4424, [1421, 794, 2209], None),
    ("Dropout", {"target": "dropout"}, "binary", 4424, [3003, 1421], None),
    ("GermanCredit", {}, "binary", 1000, [700, 300], None),
    ("Nursery", {}, "classification", 12960, [4320, 2, 328, 4266, 4044], None),
    ("WineQuality", {}, "regression", 1599, None, None),
    ("WineQuality", {"target": "good"}, "binary", 1599, [744, 855], None),
]
IDS = [name + "".join(f"-{value}" for value in options.values()) for name, options, *_ in REAL]
SCHEMAS = {identifier: getattr(tables, row[0])(**row[1]).schema for identifier, row in zip(IDS, REAL, strict=True)}


def fake_value(schema: TableSchema, name: str, generator: random.Random) -> str:
    if name == schema.label.name:
        if isinstance(schema.label, ClassLabel):
            return generator.choice(generator.choice(schema.label.values))
        return repr(generator.uniform(schema.label.low, schema.label.high))
    column = next((column for column in schema.columns if column.name == name), None)
    if column is None:
        return str(generator.randrange(10**6))
    if isinstance(column, Numeric):
        width = column.high - column.low
        return repr(generator.uniform(column.low - 0.1 * width, column.high + 0.1 * width))
    return generator.choice(column.categories)


def write(root: Path, file: str, schema: TableSchema, packed: bool, seed: int = 0) -> None:
    """ROWS random rows that keep to the schema, as a file of the published form."""
    generator = random.Random(seed)
    names = schema.names or (*schema.ignore, *(column.name for column in schema.columns), schema.label.name)
    lines = [] if schema.names else [schema.delimiter.join(f'"{name}"' for name in names)]
    if schema.comment:
        lines.append(f"{schema.comment} a remark")
    lines += [schema.delimiter.join(fake_value(schema, name, generator) for name in names) for _ in range(ROWS)]
    data = ("\n".join(lines) + "\n").encode()
    path = root / "tabular" / (file + ".gz" * packed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if packed else data)


def small(name: str, root: Path, options: dict[str, Any]) -> NamedTable:
    return type("Small", (getattr(tables, name),), {"declared_size": ROWS})(root=str(root), **options)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("row", REAL, ids=IDS)
def test_a_generated_file_of_the_published_form(row: tuple, packed: bool, tmp_path: Path) -> None:  # type: ignore[type-arg]
    name, options, task, *_ = row
    module = small(name, tmp_path, options)
    write(tmp_path, module.file, module.schema, packed)
    if module.heldout_file:
        write(tmp_path, module.heldout_file, module.schema, packed, seed=1)
    module.setup()
    assert module._train is not None and module._validation is not None
    held_out = 0 if module.heldout_file else len(module._validation)
    assert module.task == task and module.rows + held_out == ROWS
    assert module._train.x.double().norm(dim=1).max() <= module.input_bound  # type: ignore[operator]
    assert module._train.x.shape[1:] == module.input_shape


@pytest.mark.parametrize("identifier", IDS)
def test_published_columns_are_declared_or_ignored(identifier: str) -> None:
    schema = SCHEMAS[identifier]
    if schema.names is not None:
        declared = {column.name for column in schema.columns} | {schema.label.name} | set(schema.ignore)
        assert set(schema.names) == declared


def test_declared_numbers_of_features() -> None:
    expected = {"Adult": 13, "Android": 86, "BreastCancer": 30, "CaliforniaHousing": 8, "DefaultCredit": 23}
    expected |= {"Dropout": 36, "GermanCredit": 20, "Nursery": 8, "WineQuality": 11}
    # Adult publishes 14, of which the survey weight is left out
    assert {name: len(SCHEMAS[name].columns) for name in expected} == expected


def test_a_missing_table_names_file_and_publisher(tmp_path: Path) -> None:
    (tmp_path / "tabular").mkdir()
    with pytest.raises(ValueError, match=r"nursery\.data.*\nHINT: .*UCI"):
        small("Nursery", tmp_path, {}).setup()


def test_a_salt_moves_validation_rows_and_no_test_row(tmp_path: Path) -> None:
    def split(salt: str) -> list[torch.Tensor]:
        options = {"test_fraction": 0.3, "validation_fraction": 0.3, "salt": salt}
        module = small("WineQuality", tmp_path, options)
        module.setup()
        return [part.x for part in (module._train, module._validation, module._test)]  # type: ignore[union-attr]

    write(tmp_path, tables.WineQuality.file, SCHEMAS["WineQuality"], False)
    (_, kept, test), (_, moved, still) = split("lipdp"), split("fold 1")
    assert torch.equal(test, still) and len(test)
    assert kept.shape != moved.shape or not torch.equal(kept, moved)


def test_unknown_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        tables.Dropout(root=str(tmp_path), target="four")  # type: ignore[arg-type]


def test_the_published_test_labels_of_adult_end_in_a_dot(tmp_path: Path) -> None:
    line = "39, State-gov, 77516, Bachelors, 13, Never-married, ?, Not-in-family, White, Male, 2174, 0, 40, Cuba, {}\n"
    folder = tmp_path / "tabular" / "adult"
    folder.mkdir(parents=True)
    (folder / "adult.data").write_text(line.format("<=50K") * 30 + line.format(">50K") * 30 + "\n")
    (folder / "adult.test").write_text("|1x3 Cross validator\n" + line.format("<=50K.") + line.format(">50K.") + "\n")
    module = small("Adult", tmp_path, {})
    module.setup()
    assert module._train is not None and module._test is not None
    assert module._train.y.bincount().tolist() == [30, 30] and module._test.y.tolist() == [0, 1]
    assert torch.equal(module._train.x[0], module._test.x[0])


@needs_data
@pytest.mark.parametrize("row", REAL, ids=IDS)
def test_the_real_files(row: tuple) -> None:  # type: ignore[type-arg]
    name, options, task, rows, classes, held_out = row
    module = getattr(tables, name)(validation_fraction=0.0, **options)
    module.setup()
    assert module.rows == rows == module.declared_size and module.task == task
    assert module._train.x.double().norm(dim=1).max() <= module.input_bound
    if classes is not None:
        assert module._train.y.bincount().tolist() == classes
    assert (module._test and len(module._test)) == held_out


@needs_data
def test_held_out_rows_of_a_table_full_of_copies_share_none_with_training() -> None:
    module = tables.Android()
    module.setup()
    assert module._train is not None and module._validation is not None
    training = {row.numpy().tobytes() for row in module._train.x}
    shared = sum(row.numpy().tobytes() in training for row in module._validation.x)
    assert len(training) < module.rows / 2, "this table is known for its copies"
    assert shared == 0


@needs_data
def test_applications_apart_are_split_row_by_row_and_test_rows_stay_out() -> None:
    module, inner = tables.Android(identical="apart"), tables.Android(identical="apart", validation_fraction=0.2)
    for made in (module, inner):
        made.setup()
    assert module._test is not None and abs(module.rows - module.dataset_size) < 0.05 * module.dataset_size
    assert module.rows + len(module._test) == 20_531
    assert inner.rows + len(inner._validation) == module.rows and len(inner._test) == len(module._test)  # type: ignore


@needs_data
@pytest.mark.slow
def test_a_patient_is_on_one_side_and_has_no_more_stays_than_declared() -> None:
    by_patient, by_stay = tables.DiabetesHospitals(), tables.DiabetesHospitals(sampling="rows")
    for module in (by_patient, by_stay):
        module.setup()
        assert abs(module.rows - module.dataset_size) < 0.05 * module.dataset_size
    assert (by_patient.max_examples_per_unit, by_stay.max_examples_per_unit) == (1, 2)
    assert by_patient._groups is not None and int(by_patient._groups.counts.max()) == 2
    assert len(by_patient._groups.codes) == by_stay.rows
