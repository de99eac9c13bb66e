"""Every configuration in configs/ runs, if only for two steps. tests/forecast predicts whether it learns."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_runs import ROOT, fit

from lipdp_lightning.accounting.accountants import epsilon_of
from lipdp_lightning.experiment.experiment import parse_experiment
from lipdp_lightning.training.averaging import average_of
from lipdp_lightning.training.views import view_problems, views_of

EMBEDDED = ("data_modules.Digits", "data_modules.Embedded", "data_modules.Generated")
TWO_STEPS = ["--privacy.epochs", "null", "--privacy.steps", "2"]
ON_ONE_CPU = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.num_nodes", "1"]


def contents(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())


FILES = sorted((ROOT / "configs").rglob("*.yaml"))
SMALL = [f for f in FILES if contents(f)["data"]["class_path"].startswith(EMBEDDED)]
LARGE = [f for f in FILES if f not in SMALL]


def run_two_steps(file: Path, tmp_path: Path, *options: str) -> dict[str, Any]:
    """The noise is given, because no budget fits so few steps."""
    noise = []
    if contents(file)["privacy"].get("epsilon") is not None:
        noise = ["--privacy.epsilon", "null", "--privacy.noise_multiplier", "1"]
    outcome = fit(tmp_path / "run", "--config", file, *TWO_STEPS, *noise, *ON_ONE_CPU, *options)
    assert outcome.code == 0, outcome.err
    return json.loads((tmp_path / "run" / "privacy_report.json").read_text())


def check(report: dict[str, Any], file: Path) -> None:
    privacy = contents(file)["privacy"]
    assert report["steps_taken"] == 2 and report["metrics"]
    assert report["certified"] is (privacy.get("scaling") != "batch_max")
    assert (report["epsilon"] is None) is not report["certified"]


def check_kit(experiment: Any, devices: int) -> None:
    """Sixteen views, an average, and micro-batches of whole examples that make up a step."""
    strategy = experiment.trainer.strategy
    views, average = views_of(experiment.trainer), average_of(experiment.trainer)
    assert views is not None and views.number == 16 and average is not None and average.kind == "ema"
    assert view_problems(experiment.trainer, strategy, experiment.datamodule) == []
    assert strategy.physical_batch_size % views.number == 0
    rows = experiment.plan.expected_batch_size * views.number // devices
    assert rows % strategy.physical_batch_size == 0


def test_there_are_configurations() -> None:
    assert (ROOT / "configs" / "quickstart.yaml") in SMALL


@pytest.mark.parametrize("file", SMALL, ids=lambda f: f.stem)
def test_a_configuration_on_embedded_data(tmp_path: Path, file: Path) -> None:
    check(run_two_steps(file, tmp_path), file)


@pytest.mark.parametrize("file", LARGE, ids=lambda f: f.stem)
def test_a_large_configuration_is_complete(file: Path) -> None:
    """Everything but the data is built: network, plan with its calibrated noise, optimizer settings, trainer."""
    experiment = parse_experiment(["--config", str(file), *ON_ONE_CPU], None, "off")
    privacy, plan = contents(file)["privacy"], experiment.plan
    assert plan.certified and plan.expected_batch_size == privacy["batch_size"]
    bound = epsilon_of("pld", plan.events(), plan.delta, plan.adjacency).epsilon
    assert 0.95 * privacy["epsilon"] <= bound <= privacy["epsilon"] * (1 + 1e-3)
    if "_wrn" in file.stem:
        check_kit(experiment, contents(file)["trainer"]["devices"])


def test_the_wide_networks_differ_in_depth_and_budget_alone() -> None:
    files = [f for f in LARGE if "_wrn" in f.stem]
    assert len(files) == 12
    for file in files:
        content = contents(file)
        steps = content["privacy"].pop("steps")
        epsilon = content["privacy"].pop("epsilon")
        depth = content["model"]["network"]["init_args"].pop("depth")
        rows = content["privacy"].pop("physical_batch_size")
        assert file.stem == f"cifar10_wrn{depth}_4_eps{epsilon:g}" and rows == {16: 1024, 40: 512}[depth]
        assert steps == contents(file.with_name(f"cifar10_wrn16_4_eps{epsilon:g}.yaml"))["privacy"]["steps"]
        first = contents(files[0])
        for name in ("steps", "epsilon", "physical_batch_size"):
            del first["privacy"][name]
        del first["model"]["network"]["init_args"]["depth"]
        assert content == first
        assert all(word in file.read_text() for word in ("Not run on GPUs", "GPU hours", "GiB"))


@pytest.mark.slow
@pytest.mark.skipif("LIPDP_DATA" not in os.environ, reason="needs the data folder LIPDP_DATA")
def test_a_wide_residual_network_trains(tmp_path: Path) -> None:
    """Two steps of the smallest batches, thin; the twelve files differ in depth and budget alone."""
    file = ROOT / "configs" / "cifar10_wrn16_4_eps8.yaml"
    small = ["--privacy.batch_size", "4", "--data.init_args.eval_batch_size", "8"]
    limits = ["--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1"]
    content = contents(file)
    content["privacy"]["physical_batch_size"] = 4
    content["model"]["network"]["init_args"]["width"] = 1  # tests/models certifies and trains the wide ones
    for callback in content["trainer"]["callbacks"]:
        if callback["class_path"].endswith("Multiplicity"):
            callback["init_args"]["views"] = 2
    fewer_views = tmp_path / "fewer_views.yaml"
    fewer_views.write_text(yaml.safe_dump(content))
    report = run_two_steps(fewer_views, tmp_path, *small, *limits)
    check(report, file)
    assert any("mean over 2 views" in note for note in report["notes"])
    assert any("ema, decay 0.9999, over 2 steps" in note for note in report["notes"])
