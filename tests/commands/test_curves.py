"""`lipdp curves`: what it writes, what it charges, and that bad input leaves nothing behind."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lipdp_lightning.cli import main


@pytest.fixture
def table(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    score = generator.random(400)
    rows = zip(generator.normal(50, 12, 400), score, generator.random(400) < score, strict=True)
    text = "age,score,outcome,word,gap\n" + "".join(
        f"{a:.2f},{s:.4f},{'yes' if y else 'no'},x{i},{'' if i == 7 else i}\n" for i, (a, s, y) in enumerate(rows)
    )
    file = tmp_path / "table.csv"
    file.write_text(text)
    return file


def lipdp(table: Path, output: Path, *words: str) -> int:
    return main(["curves", *words, "--data", str(table), "--output", str(output)])


def record(output: Path, kind: str) -> dict[str, Any]:
    names = {path.name for path in output.iterdir()}
    assert names == {f"{kind}.json", f"{kind}.csv", f"{kind}.png"}
    assert (output / f"{kind}.png").read_bytes().startswith(b"\x89PNG")
    content: dict[str, Any] = json.loads((output / f"{kind}.json").read_text())
    assert content["privacy"]["epsilon_sum"] == pytest.approx(sum(r["epsilon"] for r in content["privacy"]["releases"]))
    return content


def columns(output: Path, kind: str) -> dict[str, np.ndarray]:
    with open(output / f"{kind}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


def test_a_distribution_function_on_a_declared_range(table: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "out"
    assert lipdp(table, output, "ecdf", "--column", "age", "--epsilon", "2", "--range=-10,110", "--levels", "6") == 0
    content, curve = record(output, "ecdf"), columns(output, "ecdf")
    assert [r["name"] for r in content["privacy"]["releases"]] == ["ecdf"]
    assert content["privacy"]["epsilon_sum"] == 2.0 and content["adjacency"] == "replace_one"
    assert content["range"]["how"] == "declared" and content["records"] == 400
    assert len(curve["point"]) == 64 and np.all(np.diff(curve["smoothed"]) >= 0) and curve["smoothed"][-1] == 1
    assert np.all(curve["lower"] <= curve["upper"])
    median = next(row for row in content["quantiles"] if row["probability"] == 0.5)
    assert (
        median["value"] == pytest.approx(50, abs=8)
        and median["interval"][0] <= median["value"] <= median["interval"][1]
    )
    assert "epsilon 2 (replace_one)" in capsys.readouterr().out


@pytest.mark.parametrize("words, share", [((), 0.1), (("--range-budget", "0.25"), 0.25)])
def test_a_range_that_is_not_declared_is_found_with_part_of_the_budget(
    table: Path, tmp_path: Path, words: tuple[str, ...], share: float
) -> None:
    output = tmp_path / "out"
    options = ("--epsilon", "4", "--delta", "1e-6", "--mechanism", "factorization", "--levels", "6")
    assert lipdp(table, output, "ecdf", "--column", "age", *options, *words) == 0
    content = record(output, "ecdf")
    spent = {r["name"]: r["epsilon"] for r in content["privacy"]["releases"]}
    assert spent == {"range": pytest.approx(4 * share), "ecdf": pytest.approx(4 * (1 - share))}
    assert content["privacy"]["delta_sum"] == 1e-6 and "found" in content["range"]["how"]
    assert content["range"]["high"] in 2.0 ** np.arange(-20, 61)


def test_the_number_of_records_is_not_written_where_it_is_private(table: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    options = ("--epsilon", "0.5", "--range", "0,120", "--adjacency", "add_remove", "--levels", "5")
    assert lipdp(table, output, "ecdf", "--column", "age", *options) == 0
    content = record(output, "ecdf")
    assert content["records"] is None and content["records_noisy"] == columns(output, "ecdf")["count_released"][-1]


def test_a_roc_curve_from_a_compressed_file(table: Path, tmp_path: Path) -> None:
    packed = tmp_path / "table.csv.gz"
    packed.write_bytes(gzip.compress(table.read_bytes()))
    output = tmp_path / "out"
    options = ("--epsilon", "20", "--range", "0,1", "--levels", "6", "--positive", "yes", "--label", "outcome")
    assert lipdp(packed, output, "roc", "--column", "score", *options) == 0
    content, curve = record(output, "roc"), columns(output, "roc")
    assert content["auc"] == pytest.approx(5 / 6, abs=0.1)
    assert content["auc_interval"]["bounds"][0] <= content["auc"] <= content["auc_interval"]["bounds"][1]
    assert curve["true_positive_rate"][0] == 1 and curve["true_positive_rate"][-1] == pytest.approx(0)


def test_a_hosmer_lemeshow_test(table: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    options = ("--epsilon", "8", "--levels", "6", "--positive", "yes", "--label", "outcome", "--groups", "4")
    assert lipdp(table, output, "hl", "--column", "score", *options) == 0
    content, groups = record(output, "hl"), columns(output, "hl")
    assert content["privacy"]["epsilon_sum"] == 8.0 and len(content["privacy"]["releases"]) == 2
    assert 0 < content["p_value"] <= 1 and content["groups"] == len(groups["above"]) <= 4
    assert groups["above"][0] == 0 and groups["up_to"][-1] == 1


def test_two_runs_have_different_noise(table: Path, tmp_path: Path) -> None:
    options = ("ecdf", "--column", "age", "--epsilon", "1", "--range", "0,120", "--levels", "5")
    for name in ("a", "b"):
        assert lipdp(table, tmp_path / name, *options) == 0
    first, second = (columns(tmp_path / name, "ecdf")["count_released"] for name in ("a", "b"))
    assert not np.array_equal(first, second)


ECDF = ("ecdf", "--column", "age", "--epsilon", "1", "--range", "0,120", "--levels", "5")


def changed(**options: str) -> tuple[str, ...]:
    words = list(ECDF)
    for name, value in options.items():
        words[words.index(f"--{name}") + 1] = value
    return tuple(words)


@pytest.mark.parametrize(
    "words, text",
    [
        (changed(range="0,60"), "outside the declared range"),
        (changed(range="60"), "not two numbers"),
        (changed(range="5,5"), "not a finite interval"),
        (changed(epsilon="0"), "epsilon 0.0 is not a positive"),
        (changed(epsilon="-1"), "epsilon"),
        (changed(epsilon="nan"), "epsilon nan"),
        (changed(epsilon="much"), "invalid float"),
        (changed(column="weight"), "no column 'weight'"),
        (changed(column="word"), "holds no number"),
        (changed(column="gap"), "line 9: column 'gap' holds no number"),
        (changed(levels="0"), "levels 0"),
        ((*ECDF, "--delta", "1e-6"), "laplace noise is pure"),
        ((*ECDF, "--mechanism", "gaussian"), "never pure"),
        ((*ECDF, "--range-budget", "0.2"), "exclude each other"),
        ((*ECDF, "--quantiles", "2"), "not probabilities"),
        ((*ECDF, "--confidence", "1"), "confidence"),
        ((*ECDF, "--delimiter", ";"), "no column 'age'"),
        (("roc", "--column", "score", "--epsilon", "1", "--range", "0,1", "--label", "outcome"), "no label is '1'"),
        (("roc", "--column", "score", "--epsilon", "1", "--range", "0,1", "--label", "word"), "more than two classes"),
        (("hl", "--column", "age", "--epsilon", "1", "--label", "outcome", "--positive", "yes"), "not in [0, 1]"),
        (("ecdf", "--column", "age"), "--epsilon"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    table: Path, tmp_path: Path, capsys: Any, words: tuple[str, ...], text: str
) -> None:
    output = tmp_path / "out"
    assert lipdp(table, output, *words) == 2
    said = capsys.readouterr()
    assert text in said.err and "HINT" in said.err
    assert said.err.count("\n") == 1 and said.err.startswith("lipdp curves: ") and said.out == ""
    assert not output.exists()


@pytest.mark.parametrize("content", ["", "age\n", "\n\n"])
def test_an_empty_column_is_refused(tmp_path: Path, capsys: Any, content: str) -> None:
    file = tmp_path / "empty.csv"
    file.write_text(content)
    assert lipdp(file, tmp_path / "out", *ECDF) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "out").exists()
    assert lipdp(tmp_path / "none.csv", tmp_path / "out", *ECDF) == 2


def test_the_record_of_a_release_is_not_overwritten(table: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "out"
    assert lipdp(table, output, *ECDF) == 0
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    assert lipdp(table, output, *ECDF) == 2
    assert "record of a release" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before


def test_a_failure_while_writing_leaves_no_part(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError("no space left on device")

    monkeypatch.setattr("lipdp_lightning.curves.columns.os.fsync", full)
    assert lipdp(table, output, *ECDF) == 2
    assert list(output.iterdir()) == []


def test_compare_prints_measured_and_stated_errors(capsys: Any) -> None:
    assert main(["curves", "compare", "--levels", "5", "--repeats", "60"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    errors = {tuple(line[:3]): [float(x) for x in line[3:]] for line in lines[1:9]}
    assert len(errors) == 8
    assert errors["laplace", "0", "replace_one"][2] == 2 * 6**3
    assert all(measured == pytest.approx(stated, rel=0.7) for measured, stated, _ in errors.values())
    assert main(["curves", "compare", "--levels", "0"]) == 2
