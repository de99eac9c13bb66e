"""`lipdp compare`: one page and one table for several runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_runs import Outcome, lipdp, snapshot
from page_check import Page

from lipdp_lightning.commands.compare import read_settings


@pytest.fixture
def runs(finished: tuple[Path, Outcome], stopped: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    shutil.copytree(finished[0], folder / "done")
    shutil.copytree(stopped, folder / "sweep" / "halted")
    return folder


def compare(*words: Any) -> dict[str, Any]:
    outcome = lipdp("compare", "--json", *words)
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_runs_are_compared_by_epsilon(runs: Path, tmp_path: Path) -> None:
    before = snapshot(runs)
    outcome = lipdp("compare", runs / "done", runs / "sweep", "--output", tmp_path / "c.html")
    assert outcome.code == 0 and outcome.err == "" and snapshot(runs) == before
    assert outcome.out.index("done") < outcome.out.index("halted")  # which guarantees more
    assert "privacy.steps" in outcome.out and "cautio" in outcome.out and "optimizer" not in outcome.out
    page = (tmp_path / "c.html").read_text()
    parsed = Page(page)
    assert parsed.problems == [] and "privacy.steps" in " ".join(parsed.texts) and "data-tips" in page


def test_epsilons_of_several_models_of_the_same_records_add(runs: Path, tmp_path: Path) -> None:
    reports = [json.loads(f.read_text()) for f in sorted(runs.rglob("privacy_report.json"))]
    content = compare(runs, "--output", tmp_path / "c.html")
    (text,) = (c for c in content["cautions"] if "composition" in c)
    total = float(text.split("epsilon = ")[1].split()[0])
    assert sum(r["epsilon"] for r in reports) <= total <= 1.001 * sum(r["epsilon"] for r in reports)
    assert all(float(row["hours of training"]) > 0 for row in content["costs"])
    assert [row["steps"] for row in content["costs"]] == ["12", "12"]


def test_the_same_metric_under_two_names_is_compared(runs: Path, tmp_path: Path) -> None:
    edit(runs / "done" / "privacy_report.json", primary_metric=None, metrics={"validation/val_acc": 0.75})
    other = {"validation/accuracy": 0.5, "validation/loss": 2.0}
    edit(runs / "sweep" / "halted" / "privacy_report.json", primary_metric="validation/accuracy", metrics=other)
    content = compare(runs, "--output", tmp_path / "c.html")
    assert [row["accuracy"].rstrip("\u00a0%") for row in content["results"]] == ["75", "50"]
    assert any("validation/accuracy, validation/val_acc" in text for text in content["cautions"])
    tips = (tmp_path / "c.html").read_text().split("data-tips")[1][:600]
    assert "done" in tips and "halted" in tips
    edit(runs / "done" / "privacy_report.json", metrics={"validation/val_balanced_accuracy": 0.75})
    results = compare(runs, "--output", tmp_path / "c.html")["results"]
    assert [row["balanced accuracy"] for row in results] == ["75\u00a0%", "-"]  # which is another metric


def test_relations_that_differ_are_pointed_out(runs: Path, tmp_path: Path) -> None:
    assert not any("relations" in c for c in compare(runs, "--output", tmp_path / "c.html")["cautions"])
    edit(runs / "done" / "privacy_report.json", adjacency="replace_one")
    assert any("must not be compared" in c for c in compare(runs, "--output", tmp_path / "c.html")["cautions"])


def test_a_run_without_a_certificate_shows_no_epsilon(runs: Path, tmp_path: Path) -> None:
    edit(runs / "done" / "privacy_report.json", certified=False, epsilon=0.01234)
    content = compare(runs, "--output", tmp_path / "c.html")
    assert [row["epsilon"] for row in content["results"]][-1] == "not private"
    assert "0.01234" not in json.dumps(content) + (tmp_path / "c.html").read_text()


@pytest.mark.parametrize("content", ["", "[]", '{"sta', "\x00\xff", '{"certified": true}', "[" * 100_000])
def test_files_that_cannot_be_read_hide_no_other_run(runs: Path, tmp_path: Path, content: str) -> None:
    for name in ("run.json", "plan.json", "privacy_report.json", "config.yaml", "progress.json"):
        (runs / "done" / name).write_text(content, encoding="latin-1")
    found = {Path(row["run"]).name: row for row in compare(runs, "--output", tmp_path / "c.html")["results"]}
    assert found["done"]["epsilon"] == "-" and float(found["halted"]["epsilon"]) > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": [1]}, {"groups": [3]}, {"groups": [{"parameters": "x"}]}, {"groups": {"a": 1}}, {"unit": {"a": []}},
        {"epsilon": 10**400}, {"delta": "1e-5"}, {"steps_taken": None}, {"metrics": {"validation/accuracy": 10**400}},
        {"history": 3}, {"primary_metric": ["a"]}, {"secret_fixed": "no"}, {"adjacency": 1},
    ],
)  # fmt: skip
def test_reports_of_other_types_are_left_out_or_shown_as_text(
    runs: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    edit(runs / "done" / "privacy_report.json", **changes)
    found = {Path(row["run"]).name: row for row in compare(runs, "--output", tmp_path / "c.html")["results"]}
    assert float(found["halted"]["epsilon"]) > 0 and Page((tmp_path / "c.html").read_text()).problems == []
    assert lipdp("status", runs).code == 0


def test_hostile_settings_are_text_and_few(runs: Path, tmp_path: Path) -> None:
    attack = "</td><script>1</script>\x1b[2J"
    shutil.copytree(runs / "done", runs / attack.replace("/", "_"))
    (runs / "done" / "config.yaml").write_text(json.dumps({attack: {"a": attack}, "seed": 1}))
    outcome = lipdp("compare", runs, "--output", tmp_path / "c.html")
    assert outcome.code == 0 and "\x1b" not in outcome.out
    parsed = Page((tmp_path / "c.html").read_text())
    assert parsed.problems == [] and "<script>1</script>" in "".join(parsed.texts)
    bomb = "a0: &a0 [x, [y]]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(9))
    (runs / "done" / "config.yaml").write_text(bomb)
    assert read_settings(runs / "done") == {}
    (runs / "done" / "config.yaml").write_text("!!python/object/apply:os.system ['exit 1']")
    assert read_settings(runs / "done") == {}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [(["nowhere"], "does not exist"), (["."], "no run in"), ([".", "--output", "c.txt"], "not an HTML page")],
)
def test_what_cannot_be_compared(tmp_path: Path, words: list[str], complaint: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = lipdp("compare", *words)
    assert outcome.code == 2 and complaint in outcome.err and "HINT" in outcome.err
    assert len(outcome.err.splitlines()) <= 2 and list(tmp_path.iterdir()) == []
