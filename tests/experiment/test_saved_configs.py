"""Every configuration that a run saves is the one that it was made from, whatever its columns are called."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from awkward_texts import AWKWARD, contents
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jsonargparse import get_loader

from lipdp_lightning.data_modules import Declaration
from lipdp_lightning.experiment.config_file import check_config_file
from lipdp_lightning.experiment.experiment import parse_experiment
from lipdp_lightning.experiment.saved_yaml import saved_yaml
from lipdp_lightning.experiment.short_names import PARSER_MODE

NETWORK = {"class_path": "lipdp_lightning.models.MLP", "init_args": {"input_shape": None, "outputs": None}}
PRIVACY = {"noise_multiplier": 2.0, "delta": 1e-7, "steps": 2, "batch_size": 1, "accountant": "rdp", "max_norm": None}
ALL = {
    "rows": 1000,
    "columns": [
        *({"name": f"{text}?", "low": 0, "high": 1} for text in AWKWARD),
        {"name": "# meds", "low": -1.5, "high": 1e22, "log": True},
        {"name": "on", "categories": AWKWARD},
        {"name": "null", "date": "%d.%m.%Y", "low": "01.01.1900", "high": "2000-02-29"},
    ],
    "ignore": ["yes"],
    "aliases": {"on": "null", "1": "on"},
    "missing": {"markers": ["null", "~", ""], "policy": "bucket"},
    "label": {"name": "007", "values": [["no", "NO", "0"], ["yes", "1e3"]]},
}


def config(schema: Any) -> dict[str, Any]:
    data = {"class_path": "data_modules.CSVTable", "init_args": {"path": "1e3.csv", "schema": schema}}
    loss = "binary_cross_entropy" if len(schema["label"]["values"]) == 2 else "cross_entropy"
    return {"model": {"network": NETWORK, "loss": loss}, "data": data, "privacy": PRIVACY}


def again(text: str, folder: Path) -> Any:
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    return parse_experiment(["--config", str(folder / "config.yaml")], None, "off")


def check(content: dict[str, Any], folder: Path) -> None:
    first = again(saved_yaml(config(content)), folder)
    saved = first.resolved()
    second = again(saved, folder)
    assert second.resolved() == saved
    schema, _ = Declaration(content).table_schema()
    assert first.datamodule.schema == second.datamodule.schema == schema
    assert second.datamodule.source == Path("1e3.csv")
    assert yaml.safe_load(saved)["model"]["network"]["init_args"]["input_shape"] == [schema.width]


def test_all_awkward_names_at_once(tmp_path: Path) -> None:
    check(ALL, tmp_path)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate])
@given(contents())
def test_any_schema(content: dict[str, Any]) -> None:
    try:
        Declaration(content).table_schema()
    except ValueError:
        return
    with tempfile.TemporaryDirectory() as folder:
        check(content, Path(folder))


def test_the_usual_dumper_of_yaml_fails_the_same_check(tmp_path: Path) -> None:
    """YAML 1.1 takes 1e3 for text, and the parser for a number."""
    usual, parser = yaml.safe_dump({"a": "1e3"}), get_loader(PARSER_MODE)
    assert parser(usual) == {"a": 1000.0} and parser(saved_yaml({"a": "1e3"})) == {"a": "1e3"}


@given(st.recursive(st.sampled_from(AWKWARD) | st.floats(allow_nan=False) | st.integers(), lambda i: st.lists(i)))
def test_what_is_written_is_read_as_that(value: Any) -> None:
    assert get_loader(PARSER_MODE)(saved_yaml({"a": value})) == {"a": value}


def test_a_schema_in_a_file_is_saved_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file may change afterwards; the run's configuration says what it was trained on."""
    monkeypatch.chdir(tmp_path)
    Declaration(ALL).save("all.schema.yaml")
    content = config(ALL)
    content["data"]["init_args"]["schema"] = "all.schema.yaml"
    first = again(yaml.safe_dump(content), tmp_path)
    (tmp_path / "all.schema.yaml").unlink()
    assert again(first.resolved(), tmp_path).datamodule.schema == first.datamodule.schema


def test_numbers_that_are_read_as_others_are_refused(tmp_path: Path) -> None:
    for text in ("007", "12:30", "1:00:00"):
        (tmp_path / "c.yaml").write_text(f"data: {{schema: [{text}, x]}}\n")
        with pytest.raises(ValueError, match=r"line 1: .* is read as another number; put quotes around it"):
            check_config_file(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_text("a: ['007', 1_000, 0, -5, 10, 1e3]\n")
    check_config_file(tmp_path / "c.yaml")
