"""docs/bring_your_own_data.md as a new user follows it: its CSV file, its YAML, its command, its error message."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lipdp_lightning.cli import main
from lipdp_lightning.data_modules import CSVTable

PAGE = (Path(__file__).parents[2] / "docs" / "bring_your_own_data.md").read_text(encoding="utf-8")


def block(language: str, index: int = 0) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[index]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the page's own files in it."""
    monkeypatch.chdir(tmp_path)
    exec(compile(block("python"), "docs/bring_your_own_data.md", "exec"), {})
    (tmp_path / "people.yaml").write_text(block("yml"), encoding="utf-8")
    return tmp_path


def command(*more: str) -> list[str]:
    words = block("sh").split()
    assert words[0] == "lipdp"
    return [*words[1:], *more]


@pytest.mark.filterwarnings("ignore")
def test_from_csv_to_report_in_ten_lines(folder: Path) -> None:
    assert len(block("yml").splitlines()) == 10
    assert main(command("--wandb", "off", "--trainer.enable_progress_bar", "false")) == 0
    report = json.loads((folder / "runs/people/privacy_report.json").read_text())
    assert (folder / "runs/people/report.html").is_file()
    assert report["certified"] and report["epsilon"] <= 2 and report["delta"] == 1e-4
    assert report["metrics"]["validation/accuracy"] > 0.65, "the larger class has 0.51"


@pytest.mark.filterwarnings("ignore")
def test_the_message_on_the_page_is_the_one_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (folder / "people.csv").read_text().splitlines()
    lines[6] = re.sub("clerk|farmer|teacher", "pilot", lines[6])
    (folder / "people.csv").write_text("\n".join(lines))
    assert main(command("--wandb", "off")) == 2
    shown = capsys.readouterr().err.splitlines()
    assert [line for line in shown if not line.startswith("HINT")][:2] == block("text").splitlines()
    assert not (folder / "runs").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_input_shape_names_the_right_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("--wandb", "off", "--model.network.init_args.input_shape", "[4]")) == 2
    assert "(batch, 5)" in capsys.readouterr().err


def test_every_class_the_page_names_exists() -> None:
    from lipdp_lightning import data_modules

    section = PAGE.split("## The data sets that are known here")[1].split("## ")[0]
    named = set(re.findall(r"`([A-Z]\w+)`", section)) - {"LIPDP_DATA"}
    generic = {
        "CSVTable",
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
