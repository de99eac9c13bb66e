"""The audit asks about neighbouring runs of any configuration: correct ones pass, and Algorithm 8 does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gallery import mlp, plan_of
from test_audit_canaries import Rows
from test_audit_suite import OPTIONS

from lipdp_lightning.audit.findings import Finding
from lipdp_lightning.audit.neighbouring_runs import neighbouring_finding
from lipdp_lightning.audit.subject import Subject
from lipdp_lightning.audit.suite import EFFORTS, Questions
from lipdp_lightning.audit.synthetic import plain_copy
from lipdp_lightning.experiment.experiment import parse_experiment
from lipdp_lightning.mechanism.step import Mechanism
from lipdp_lightning.training import PrivateModule

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def asked(**options: Any) -> Finding:
    plan = plan_of(**{"expected_batch_size": 100, "steps": 12} | options)
    subject = Subject(PrivateModule(mlp()), plan, (12,))
    x, y, _ = subject.examples(1, seed=5)
    try:
        return neighbouring_finding(PrivateModule(mlp()), plan, Rows(), subject, (x[0] / x[0].norm(), y[0]))
    finally:
        subject.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_correct_configurations_pass(name: str) -> None:
    found = asked(**OPTIONS[name])
    assert not found.violated, found.statement
    assert 0 < found.values["touched"] < found.values["steps"] and 0 < found.factor <= 1
    assert "equal" in found.statement


@pytest.mark.slow
def test_algorithm_8_follows_the_batch() -> None:
    found = asked(scaling="batch_max", allow_noncertified=True)
    assert found.violated and "faults" in found.statement, found.statement
    assert any("divisor" in fault for fault in found.values["faults"])


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["joint", "layerwise", "exact"])
def test_the_quick_start_passes(scaling: str) -> None:
    """With its own network, optimizer settings and plan; no row of its data is read."""
    words = ["--config", str(CONFIGS / "quickstart.yaml"), "--privacy.epochs", "2", "--privacy.scaling", scaling]
    words += ["--privacy.epsilon", "null", "--privacy.noise_multiplier", "1.0"]
    words += ["--privacy.radius", "0.1"] if scaling == "exact" else []
    experiment = parse_experiment([*words, "--trainer.enable_progress_bar", "false"], None, "off")
    module, plan, data = plain_copy(experiment.model), experiment.plan, experiment.datamodule
    subject = Subject(plain_copy(experiment.model), plan, data.input_shape)
    x, y, _ = subject.examples(1, seed=5)
    found = neighbouring_finding(module, plan, data, subject, (x[0] / x[0].norm(), y[0]))
    subject.close()
    assert not found.violated, found.statement
    assert found.values["touched"] > 0 and found.factor > 0.05


def test_it_belongs_to_the_full_suite_alone() -> None:
    for name, effort in EFFORTS.items():
        questions = Questions(PrivateModule(mlp()), plan_of(), Rows(), effort, 0, Mechanism)
        assert ("neighbouring runs" in questions.exact()) is (name == "full")
        questions.close()
