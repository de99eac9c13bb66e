"""A configured run with views and an average: what fit prints, test evaluates and export releases is the average."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from command_runs import SMALL, Outcome, fit, lipdp
from torch import nn

from lipdp_lightning.data_modules import Digits
from lipdp_lightning.layers import BoundedInput
from lipdp_lightning.models import MLP

CALLBACKS = {
    "trainer": {
        "callbacks": [
            {
                "class_path": "callbacks.AugmentationMultiplicity",
                "init_args": {
                    "views": 3,
                    "augmentations": [
                        {"class_path": "lipdp_lightning.augmentations.ShiftedCrop", "init_args": {"padding": 1}},
                        {"class_path": "torch.nn.Identity"},
                    ],
                },
            },
            {
                "class_path": "callbacks.ParameterAveraging",
                "init_args": {"kind": "weighted", "start_step": 3, "raw_metrics": True},
            },
        ]
    }
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    directory = tmp_path_factory.mktemp("averaged")
    file = directory / "kit.yaml"
    file.write_text(yaml.safe_dump(CALLBACKS))
    return directory / "run", fit(directory / "run", *SMALL, "--config", file)


def outputs(weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits and labels of the validation rows, computed here without the commands."""
    network = nn.Sequential(BoundedInput(1.0, "normalize"), MLP(input_shape=(1, 8, 8), outputs=10, bias=False))
    network[1].load_state_dict(weights)
    data = Digits()
    data.setup()
    x, y, _ = next(iter(data.val_dataloader()))
    with torch.no_grad():
        return network(data.transform_batch(x)), y


def accuracy(weights: dict[str, torch.Tensor]) -> float:
    logits, y = outputs(weights)
    return float((logits.argmax(1) == y).float().mean())


def test_the_average_is_evaluated_tested_and_released(run: tuple[Path, Outcome], tmp_path: Path) -> None:
    directory, outcome = run
    assert outcome.code == 0, outcome.err
    saved = torch.load(directory / "checkpoints/last.ckpt", weights_only=True)
    state = saved["callbacks"]["lipdp_average"]
    assert state["count"] == 10 and "weights               averaged: weighted, over 10 steps" in outcome.out
    average = {name: values.float() for name, values in state["average"].items()}
    last = {k.removeprefix("network."): v for k, v in saved["state_dict"].items() if k.startswith("network.")}
    metrics = json.loads((directory / "privacy_report.json").read_text())["metrics"]
    assert metrics["validation/accuracy"] == pytest.approx(accuracy(average))
    assert metrics["validation/accuracy_last_weights"] == pytest.approx(accuracy(last))
    # accuracies may be equal by chance; the logits of two sets of weights are not
    assert not torch.equal(outputs(average)[0], outputs(last)[0])

    tested = json.loads(lipdp("test", "--run_dir", directory, "--json").out)
    assert tested["weights"] == "averaged: weighted, over 10 steps"
    assert tested["metrics"]["validation/accuracy"] == pytest.approx(accuracy(average))

    assert (
        "averaged: weighted, over 10 steps"
        in lipdp("export", "--run_dir", directory, "--output", tmp_path / "release.pt").out
    )
    release = torch.load(tmp_path / "release.pt", weights_only=True)
    assert release["weights"] == "averaged: weighted, over 10 steps"
    assert all(torch.equal(release["state_dict"][name], values) for name, values in average.items())
    assert set(release["certificate"][0]) >= {"lipschitz", "worst_case"}


def test_the_report_names_views_and_average(run: tuple[Path, Outcome]) -> None:
    text = (run[0] / "privacy_report.md").read_text()
    assert "the mean over 3 views (ShiftedCrop, Identity)" in text
    assert "averaged weights (weighted, over 10 steps); the average was certified anew" in text


def test_a_run_without_an_average_is_tested_at_its_last_weights(stopped: Path) -> None:
    assert json.loads(lipdp("test", "--run_dir", stopped, "--json").out)["weights"] == "those of the last step"


def test_an_augmentation_that_mixes_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    file = tmp_path / "kit.yaml"
    mixing = {"views": 2, "augmentations": [{"class_path": "torch.nn.BatchNorm2d", "init_args": {"num_features": 1}}]}
    chosen = {"callbacks": [{"class_path": "callbacks.AugmentationMultiplicity", "init_args": mixing}]}
    file.write_text(yaml.safe_dump({"trainer": chosen}))
    outcome = fit(tmp_path / "run", *SMALL, "--config", file)
    assert outcome.code == 2 and "augmentation BatchNorm2d" in outcome.err and "HINT" in outcome.err
    assert not (tmp_path / "run").exists()
