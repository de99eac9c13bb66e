"""`lipdp predict` and `load_release`: a run and the file exported from it give the same outputs."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from command_runs import Outcome, lipdp, snapshot

import lipdp_lightning
from lipdp_lightning.release import load_release


@pytest.fixture(scope="module")
def exported(finished: tuple[Path, Outcome], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("exported") / "model.pt"
    assert lipdp("export", "--run_dir", finished[0], "--output", target).code == 0
    return target


def changed(exported: Path, folder: Path, **changes: Any) -> Path:
    content = torch.load(exported, weights_only=True) | changes
    torch.save({k: v for k, v in content.items() if v is not None}, folder / "changed.pt")
    return folder / "changed.pt"


def test_outputs_of_a_run_reproduce_its_accuracy(finished: tuple[Path, Outcome], tmp_path: Path) -> None:
    before = snapshot(finished[0])
    outcome = lipdp("predict", "--run_dir", finished[0], "--output", tmp_path / "out.csv")
    assert outcome.code == 0 and "guarantee does not cover" in outcome.out and snapshot(finished[0]) == before
    with open(tmp_path / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    right = np.mean([row["prediction"] == row["target"] for row in rows])
    metrics = yaml.safe_load((finished[0] / "privacy_report.json").read_text())["metrics"]
    assert right == pytest.approx(metrics["validation/accuracy"], abs=1e-6)
    for row in rows:
        shares = [float(row[f"probability_{index}"]) for index in range(10)]
        assert sum(shares) == pytest.approx(1) and int(row["prediction"]) == np.argmax(shares)


def test_a_release_predicts_what_its_run_does(finished: tuple[Path, Outcome], exported: Path, tmp_path: Path) -> None:
    words = {"run.npz": ["--run_dir", finished[0]], "release.npz": ["--release", exported]}
    for name, source in words.items():
        assert lipdp("predict", *source, "--output", tmp_path / name).code == 0
    one, other = (np.load(tmp_path / name, allow_pickle=False) for name in words)
    assert set(one) == set(other) and "probability_9" in one
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_a_temperature_moves_probabilities_and_no_prediction(exported: Path, tmp_path: Path) -> None:
    for name, file in {"a.npz": exported, "b.npz": changed(exported, tmp_path, temperature=7.0)}.items():
        assert lipdp("predict", "--release", file, "--output", tmp_path / name).code == 0
    one, other = (np.load(tmp_path / name, allow_pickle=False) for name in ("a.npz", "b.npz"))
    assert np.array_equal(one["prediction"], other["prediction"])
    assert abs(one["probability_0"] - other["probability_0"]).max() > 1e-3


def test_the_top_of_the_package_offers_it_and_the_model_runs(exported: Path) -> None:
    release = lipdp_lightning.load_release(exported)
    assert release.epsilon is not None and release.plan["steps"] == 12 and "MLP" in release.config
    assert (
        repr(release).startswith(f"<Release {exported}: ") and "at delta" in repr(release) and len(repr(release)) < 300
    )
    model = release.module()
    assert not model.training and model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert all(torch.equal(model.network.state_dict()[k], v) for k, v in release.state_dict.items())
    with pytest.raises(AttributeError, match="no attribute 'load_releases'"):
        _ = lipdp_lightning.load_releases


class Touch:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.place), "w")


@pytest.mark.parametrize("name", ["state_dict", "plan", "privacy_report", "statistics", "certificate", "extra"])
def test_no_code_of_a_released_file_runs(exported: Path, tmp_path: Path, name: str) -> None:
    file = changed(exported, tmp_path, **{name: {"x": Touch(tmp_path / "ran")}})
    with pytest.raises(ValueError, match=r"nothing of it was run.*HINT"):
        load_release(file)
    outcome = lipdp("predict", "--release", file, "--output", tmp_path / "out.csv")
    assert outcome.code == 2 and len(outcome.err.splitlines()) == 1 and "HINT" in outcome.err
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2}, {"format": True}, {"config": None}, {"plan": [1]}, {"state_dict": {"a": 1}},
        {"temperature": float("nan")}, {"temperature": 0.0}, {"privacy_report": "x"}, {"weights": 3},
    ],
)  # fmt: skip
def test_a_file_that_is_no_release_is_refused(exported: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is not a release.*HINT"):
        load_release(changed(exported, tmp_path, **changes))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x04K\x01.", b"[1]"])
def test_a_file_that_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    for place in (tmp_path / "x.pt", tmp_path, tmp_path / "none.pt"):
        with pytest.raises(ValueError, match=r"cannot be read.*HINT"):
            load_release(place)


def test_foreign_code_of_a_configuration_runs_only_if_it_is_trusted(exported: Path, tmp_path: Path) -> None:
    config = yaml.safe_load(load_release(exported).config)
    config["model"]["network"] = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "ran"]}}
    release = load_release(changed(exported, tmp_path, config=yaml.safe_dump(config)))
    with pytest.raises(ValueError, match=r"names code outside this package: subprocess.Popen"):
        release.module()
    outcome = lipdp("predict", "--release", release.path, "--output", tmp_path / "out.csv")
    assert outcome.code == 2 and "subprocess.Popen" in outcome.err and not (tmp_path / "out.csv").exists()


def test_weights_of_another_network_are_refused(exported: Path, tmp_path: Path) -> None:
    weights = {"nothing.weight": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"weights of another network.*HINT"):
        load_release(changed(exported, tmp_path, state_dict=weights)).module()


def test_a_copied_run_with_foreign_code_is_refused(finished: tuple[Path, Outcome], tmp_path: Path) -> None:
    shutil.copytree(finished[0], tmp_path / "copy")
    config = yaml.safe_load((tmp_path / "copy" / "config.yaml").read_text())
    config["model"]["network"]["class_path"] = "os.system"
    (tmp_path / "copy" / "config.yaml").write_text(yaml.safe_dump(config))
    outcome = lipdp("predict", "--run_dir", tmp_path / "copy", "--output", tmp_path / "out.csv")
    assert outcome.code == 2 and "os.system" in outcome.err and "--trust_config" in outcome.err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "either --run_dir or --release"), (["--run_dir", "a", "--release", "b"], "either"),
        (["--run_dir", "a", "--output", "x.txt"], "neither .csv nor .npz"),
        (["--run_dir", "nowhere"], "does not exist"),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted(tmp_path: Path, words: list[str], complaint: str) -> None:
    words = words if "--output" in words else [*words, "--output", str(tmp_path / "out.csv")]
    outcome = lipdp("predict", *words)
    assert outcome.code == 2 and complaint in outcome.err and "HINT" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_is_kept(finished: tuple[Path, Outcome], tmp_path: Path) -> None:
    (tmp_path / "out.csv").write_text("mine")
    outcome = lipdp("predict", "--run_dir", finished[0], "--output", tmp_path / "out.csv")
    assert outcome.code == 2 and "exists" in outcome.err and (tmp_path / "out.csv").read_text() == "mine"
