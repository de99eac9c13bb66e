"""docs/bring_your_own_data.md as a new user follows it: its CSV file, its files in YAML, its commands, its Python."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from lipdp_lightning.cli import main
from lipdp_lightning.data_modules import CSVTable, PrivateData, PrivateDataModule
from lipdp_lightning.data_modules.placeholders import FILL_IN, placeholders

PAGE = (Path(__file__).parents[2] / "docs" / "bring_your_own_data.md").read_text(encoding="utf-8")


def block(language: str, index: int = 0) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[index]


def run_python(*indices: int) -> dict[str, object]:
    names: dict[str, object] = {}
    for index in indices:
        exec(compile(block("python", index), "docs/bring_your_own_data.md", "exec"), names)
    return names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the page's own files in it."""
    monkeypatch.chdir(tmp_path)
    run_python(0)
    (tmp_path / "people.schema.yaml").write_text(block("yml", 0), encoding="utf-8")
    (tmp_path / "people.yaml").write_text(block("yml", 1), encoding="utf-8")
    return tmp_path


def command(index: int, *more: str) -> list[str]:
    words = block("sh", index).split()
    assert words[0] == "lipdp"
    return [*words[1:], *more]


def test_the_files_on_the_page_are_those_of_init_filled_in(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where init wrote no placeholder, the page says the same; nothing is left open on the page."""
    shown = [yaml.safe_load((folder / name).read_text()) for name in ("people.schema.yaml", "people.yaml")]
    for name in ("people.schema.yaml", "people.yaml"):
        (folder / name).unlink()
    assert main(command(0)) == 0
    written = [yaml.safe_load((folder / name).read_text()) for name in ("people.schema.yaml", "people.yaml")]
    assert not list(placeholders(shown)) and len(list(placeholders(written))) == 5 + 4
    assert [entry["name"] for entry in written[0]["columns"]] == [entry["name"] for entry in shown[0]["columns"]]
    assert written[0]["label"]["name"] == shown[0]["label"]["name"] and written[0].keys() == shown[0].keys()
    for group in ("model", "data", "privacy"):
        for key, value in written[1][group].items():
            assert value in (FILL_IN, shown[1][group][key]), key
    assert "only the names were read" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_from_csv_to_report(folder: Path) -> None:
    assert len(block("yml", 0).splitlines()) + len(block("yml", 1).splitlines()) == 13
    assert main(command(1, "--wandb", "off", "--trainer.enable_progress_bar", "false")) == 0
    report = json.loads((folder / "runs/people/privacy_report.json").read_text())
    assert (folder / "runs/people/report.html").is_file()
    assert report["certified"] and report["epsilon"] <= 2 and report["delta"] == 1e-4
    assert report["metrics"]["validation/accuracy"] > 0.65, "the larger class has 0.51"
    assert report["data"][0] == "CSVTable: binary, 2000 rows declared, N = 1600"


def test_the_python_on_the_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_python(1)
    people = names["data"]
    assert isinstance(people, CSVTable) and people.input_shape == (5,)
    assert "'age' is a number, clipped to [18, 90]; it becomes one number of a row" in capsys.readouterr().out
    names = run_python(1, 2, 3)
    study = names["study"]()  # type: ignore[operator]
    for data, rows in ((people, 1600), (names["data"], 400), (study, 80)):
        assert isinstance(data, PrivateDataModule) and data.dataset_size == rows
        data.setup()
        assert data.holds_rows_out
    assert names["PrivateData"] is PrivateData


@pytest.mark.filterwarnings("ignore")
def test_the_message_on_the_page_is_the_one_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (folder / "people.csv").read_text().splitlines()
    lines[6] = re.sub("clerk|farmer|teacher", "pilot", lines[6])
    (folder / "people.csv").write_text("\n".join(lines))
    assert main(command(1, "--wandb", "off")) == 2
    shown = capsys.readouterr().err.splitlines()
    assert [line for line in shown if not line.startswith("HINT")][:2] == block("text").splitlines()
    assert not (folder / "runs").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_input_shape_names_the_right_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(1, "--wandb", "off", "--model.network.init_args.input_shape", "[4]")) == 2
    assert "(batch, 5)" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data.init_args.schema", "none.yaml"], "data: there is no file none.yaml. HINT: "),
        (["--data.init_args.schema.rows", "7"], "an option cannot replace a part of a schema. HINT: "),
        (["--data.init_args.path", "none.csv"], "there is no file none.csv. HINT: "),
    ],
)
def test_what_a_network_waits_for_is_refused_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """The network takes its shapes from the data, which cannot be made."""
    assert main(command(1, "--wandb", "off", *words)) == 2
    error = capsys.readouterr().err
    assert message in error and "Namespace(" not in error and not (folder / "runs").exists()


def test_every_class_the_page_names_exists() -> None:
    from lipdp_lightning import data_modules

    section = PAGE.split("## The data sets that are known here")[1].split("## ")[0]
    named = set(re.findall(r"`([A-Z]\w+)`", section)) - {"LIPDP_DATA"}
    generic = {
        "CSVTable",
        "Declaration",
        "DeclaredArrays",
        "FrameTable",
        "PrivateData",
        "TarShards",
        "ImageFolder",
        "MappedArrays",
        "NpzArrays",
        "PrivateDataModule",
        "SchemaTable",
        "TableSchema",
    }
    assert named == set(data_modules.__all__) - generic - {"Features"}


def test_a_schema_in_place_is_that_of_a_file(tmp_path: Path) -> None:
    text = "rows: 4\ncolumns: [{name: a, low: 0, high: 1}]\nlabel: {name: y, values: ['0', '1']}\n"
    (tmp_path / "schema.yaml").write_text(text)
    inline = {
        "rows": 4,
        "columns": [{"name": "a", "low": 0, "high": 1}],
        "label": {"name": "y", "values": ["0", "1"]},
    }
    assert CSVTable("t.csv", inline).schema == CSVTable("t.csv", str(tmp_path / "schema.yaml")).schema
    with pytest.raises(ValueError, match=r"the schema: schema: unknown key 'row'.*\nHINT"):
        CSVTable("t.csv", inline | {"row": 5})
