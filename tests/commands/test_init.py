"""lipdp init: what it writes, that it reads names and no row, and that nothing trains before all is filled in."""

from __future__ import annotations

import csv
import gzip
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from lipdp_lightning.cli import main
from lipdp_lightning.data_modules import headers
from lipdp_lightning.data_modules.placeholders import FILL_IN

HEADER = ["# meds", "no", "job", "bought"]
NAMES = "# meds,no,job,bought"


def rows(count: int = 400) -> list[list[Any]]:
    dice = random.Random(0)
    return [[dice.randint(0, 9), dice.random(), dice.choice("abc"), dice.choice(["no", "yes"])] for _ in range(count)]


def write(path: Path, header: list[str] | None, body: list[list[Any]], **options: Any) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, **options).writerows([*([header] if header else []), *body])
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.csv", HEADER, rows())
    return tmp_path


def test_only_the_names_are_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables with one header and any rows, or none, lead to the same files."""
    assert main(["init", "t.csv", "--label", "bought"]) == 0
    said, written = capsys.readouterr().out, [(folder / f).read_text() for f in ("t.yaml", "t.schema.yaml")]
    assert "9 entries are to be filled in; then: lipdp fit --config t.yaml" in said
    for body in ([], [["x"] * 4], [[SECRET := "918273645", 1, "", ""]] * 9, [["ragged"]]):
        for name in ("t.yaml", "t.schema.yaml"):
            (folder / name).unlink()
        write(folder / "t.csv", HEADER, body)
        with (folder / "t.csv").open("ab") as file:
            file.write(b"\xff\xfe\x00 no text")
        assert main(["init", "t.csv", "--label", "bought"]) == 0
        assert [(folder / f).read_text() for f in ("t.yaml", "t.schema.yaml")] == written
        assert SECRET not in "".join(written) if body and body[0][0] == SECRET else True
    schema = yaml.safe_load(written[1])
    assert [entry["name"] for entry in schema["columns"]] == HEADER[:3]
    assert schema["rows"] == FILL_IN and schema["label"] == {"name": "bought", "kind": FILL_IN}


def test_a_broken_variant_that_reads_a_type_from_the_rows_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def guessing(path: Path, *rest: Any) -> headers.Header:
        found = table_header(path, *rest)
        first = path.read_text().splitlines()[1].split(",")
        return headers.Header(
            [f"{n} number" if v.isdigit() else n for n, v in zip(found.names, first, strict=True)], ","
        )

    table_header = headers.table_header
    monkeypatch.setattr(headers, "table_header", guessing)
    written = []
    for body in (rows(), [["x"] * 4]):
        write(folder / "t.csv", HEADER, body)
        assert main(["init", "t.csv", "--output", f"t{len(written)}.yaml"]) == 0
        written.append((folder / f"t{len(written)}.schema.yaml").read_text())
    assert written[0] != written[1]


@pytest.mark.filterwarnings("ignore")
def test_nothing_trains_before_all_is_filled_in(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "t.csv"]) == 0
    capsys.readouterr()
    for command in (["fit", "--wandb", "off"], ["certify"], ["audit"], ["tune", "--trials", "1", "--out", "runs/s"]):
        assert main([command[0], "--config", "t.yaml", *command[1:]]) == 2
        where = "the configuration" if command[0] == "tune" else "t.yaml"
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 4 + 1 + 4 + 1 and all(" HINT: " in line for line in lines)
        for part in (
            f"{where}: privacy.epsilon",
            f"{where}: model.loss",
            "t.schema.yaml: rows",
            "column '# meds'",
            "label",
        ):
            assert sum(part in line for line in lines) == 1, part
    assert not (folder / "runs").exists() and not (folder / "audit").exists()
    text = (folder / "t.schema.yaml").read_text().replace(f"rows: {FILL_IN}", "rows: 400")
    for name, entry in (
        ('"# meds"', "low: 0, high: 9"), ('"no"', "low: 0, high: 1"), ("job", "categories: [a, b, c]"),
    ):  # fmt: skip
        text = text.replace(f"name: {name}, kind: {FILL_IN}", f"name: {name}, {entry}")
    text = text.replace(f"  - {{name: bought, kind: {FILL_IN}}}\n", "")
    (folder / "t.schema.yaml").write_text(
        text.replace(f"label: {FILL_IN}", 'label: {name: bought, values: ["no", "yes"]}')
    )
    config = (folder / "t.yaml").read_text()
    for key, value in (("epsilon", "2"), ("delta", "1.0e-4"), ("batch_size", "40"), ("loss", "binary_cross_entropy")):
        config = config.replace(f"{key}: {FILL_IN}", f"{key}: {value}")
    (folder / "t.yaml").write_text(config)
    quick = ["--privacy.epochs", "1", "--wandb", "off", "--trainer.enable_progress_bar", "false"]
    assert main(["fit", "--config", "t.yaml", "--run_dir", "r", *quick]) == 0
    assert "validation/accuracy" in capsys.readouterr().out
    saved = yaml.safe_load((folder / "r/config.yaml").read_text())
    assert saved["model"]["network"]["init_args"]["input_shape"] == [5]
    assert saved["data"]["init_args"]["schema"]["columns"][0]["name"] == "# meds"
    assert main(["certify", "--config", "r/config.yaml"]) == 0
    report = (folder / "r/privacy_report.md").read_text()
    assert "## What was declared" in report and "CSVTable: binary, 400 rows declared, N = 320" in report
    assert "What was declared" in (folder / "r/report.html").read_text()


def test_a_public_sample_fills_in_suggestions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "public.csv", HEADER, rows(50))
    options = ["--public-sample", "public.csv", "--label", "bought", "--rows", "400"]
    assert main(["init", "t.csv", *options]) == 0
    assert "2 entries are to be filled in" in capsys.readouterr().out
    schema = yaml.safe_load((folder / "t.schema.yaml").read_text())
    assert schema["columns"][2] == {"name": "job", "categories": ["a", "b", "c"], "other": True}
    assert schema["label"] == {"name": "bought", "values": ["no", "yes"]} and schema["rows"] == 400
    config = yaml.safe_load((folder / "t.yaml").read_text())
    assert config["privacy"]["batch_size"] == 40 and config["model"]["loss"]["init_args"] == {"temperature": 0.1}
    (folder / "link.csv").symlink_to(folder / "t.csv")
    for private in ("t.csv", "link.csv"):
        assert main(["init", "t.csv", "--public-sample", private, "--output", "u.yaml"]) == 2
        assert "is the private table itself" in capsys.readouterr().err and not (folder / "u.yaml").exists()


def test_files_of_every_form(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "semi.csv", HEADER, [], delimiter=";")
    (folder / "packed.csv.gz").write_bytes(gzip.compress(b"a\tb\n"))
    (folder / "latin.csv").write_bytes("gr\xf6\xdfe,y\n".encode("latin-1"))
    write(folder / "bare.csv", None, rows())
    for name, words, expected in [
        ("semi.csv", [], {"delimiter": ";"}),
        ("packed.csv.gz", [], {"delimiter": "\t"}),
        ("latin.csv", ["--encoding", "latin-1"], {"encoding": "latin-1"}),
        ("bare.csv", ["--names", NAMES], {"names": HEADER}),
    ]:
        assert main(["init", name, *words]) == 0
        schema = yaml.safe_load((folder / f"{name.partition('.')[0]}.schema.yaml").read_text())
        assert {key: schema.get(key) for key in expected} == expected
    capsys.readouterr()


def test_a_parquet_file_shows_its_names_alone(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for number, values in enumerate(([1, 2], [1.5, None], ["a", "b"])):
        parquet.write_table(pyarrow.table({"a": values, "y": [0, 1]}), folder / "p.parquet")
        assert main(["init", "p.parquet", "--output", f"p{number}.yaml"]) == 0
    texts = {(folder / f"p{number}.schema.yaml").read_text() for number in range(3)}
    assert len(texts) == 1


BAD = {
    "no file": (["none.csv"], "there is no file none.csv"),
    "a row first": (["bare.csv"], "its first line holds a number, so it may be a row and no header"),
    "twice": (["twice.csv"], "two columns have one name"),
    "empty": (["empty.csv"], "has an empty first line"),
    "label": (["t.csv", "--label", "bougth"], "--label 'bougth' is not a column of t.csv"),
    "max rows": (["t.csv", "--max-rows", "3"], "--max-rows needs --group"),
    "rows": (["t.csv", "--rows", "0"], "--rows 0 is not positive"),
    "sample": (["t.csv", "--public-sample", "none.csv"], "--public-sample none.csv is not a file"),
    "encoding": (["t.csv", "--encoding", "klingon"], "encoding is 'klingon'"),
    "zip": (["zip.csv"], "is a zip archive"),
    "there": (["t.csv", "--output", "there.yaml"], "there.yaml exists already"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_writes_nothing_and_shows_no_row(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "bare.csv", None, [["Anna", 918273, "x", "y"]])
    (folder / "twice.csv").write_text("a,a\n")
    (folder / "empty.csv").write_text("\n")
    (folder / "zip.csv").write_bytes(b"PK\x03\x04 and so on")
    (folder / "there.yaml").write_text("mine\n")
    before = {path.name for path in folder.iterdir()}
    words, message = BAD[case]
    assert main(["init", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and "HINT" in error and "Anna" not in error and "918273" not in error
    assert {path.name for path in folder.iterdir()} == before and (folder / "there.yaml").read_text() == "mine\n"
