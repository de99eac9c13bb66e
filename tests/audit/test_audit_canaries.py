"""Canaries come close to a true claim and do not exceed it; false claims are refuted."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from gallery import ALPHA, HalfTheSensitivity, subject_of
from torch import Tensor, nn

from lipdp_lightning.audit.canaries import gradient_canary, run_finding, run_scores, step_finding, step_scores
from lipdp_lightning.audit.neighbours import search_neighbours
from lipdp_lightning.audit.one_run import CanaryStrategy, OneRun, canary_run, one_run_finding
from lipdp_lightning.audit.sampling_checks import plan_sampler
from lipdp_lightning.budget.calibrate import privacy_bound
from lipdp_lightning.data_modules.base import PrivateDataModule
from lipdp_lightning.mechanism.scaling import StepNumbers
from lipdp_lightning.mechanism.step import Mechanism
from lipdp_lightning.training import PrivateModule


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Rows(PrivateDataModule):
    input_shape = (12,)
    task = "classification"
    num_classes = 5
    declared_size = 1000

    def load_train(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(1000, 12, generator=generator), torch.randint(5, (1000,), generator=generator)


@pytest.mark.slow
def test_a_gradient_canary_shows_seventy_percent_of_the_gaussian_mechanism() -> None:
    """At a confidence of 99.99 %, and not more than is claimed."""
    subject = subject_of(noise_multiplier=1.0)
    scores = step_scores(subject, 3000, canary=gradient_canary(subject))
    found = step_finding("gradient canary", subject.plan, scores, ALPHA, 1.0)
    assert not found.violated
    assert 0.7 * found.epsilon_claimed <= found.epsilon_lower <= found.epsilon_claimed


def test_composed_runs_without_sampling_show_the_composition() -> None:
    """Ten steps of the whole data, as runs: 1/sqrt(10) of a step's claim each, and the epsilon of all ten."""
    subject = subject_of(noise_multiplier=1.0, expected_batch_size=1000, steps=10, scaling="joint")
    plan = subject.plan
    sampler = plan_sampler(plan)
    scores = run_scores(subject, sampler, 240, canary=gradient_canary(subject))
    claimed = privacy_bound(1.0, plan.delta, 1.0, 10, "pld").epsilon
    found = run_finding("whole runs", plan, scores, 0.01, claimed)
    assert not found.violated
    assert 0.35 * claimed <= found.epsilon_lower <= claimed
    # the same scores refute the claim of twice the noise
    doubled = dataclasses.replace(plan, noise_multiplier=2.0)
    small = privacy_bound(2.0, plan.delta, 1.0, 10, "pld").epsilon
    assert run_finding("whole runs", doubled, scores, 0.01, small).violated


def test_the_worst_example_as_a_canary_refutes_the_batch_maximum() -> None:
    for options, violated in (
        ({"scaling": "layerwise"}, False),
        ({"scaling": "batch_max", "allow_noncertified": True}, True),
    ):
        subject = subject_of(**options)
        worst = search_neighbours(subject, restarts=0, climbs=0)
        scores = step_scores(subject, 150, pair=worst.pair)
        found = step_finding("input canary", subject.plan, scores, ALPHA, 1.0)
        assert found.violated is violated, found.statement
        assert (found.factor > 1) is violated


class HalfNoise(CanaryStrategy):
    """The run of a mechanism that states and adds a quarter of the noise."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        stated = self.mechanism.numbers

        def quarter() -> StepNumbers:
            numbers = stated()
            return dataclasses.replace(numbers, deviations={n: v / 4 for n, v in numbers.deviations.items()})

        self.mechanism.numbers = quarter


def module() -> PrivateModule:
    torch.manual_seed(0)
    return PrivateModule(nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 5)))


def test_one_run_of_the_trainer_is_guessed_no_better_than_claimed_and_with_less_noise_it_is() -> None:
    plan = subject_of(
        steps=60, noise_multiplier=0.8, expected_batch_size=200, scaling="joint", allocation="global"
    ).plan
    run = canary_run(module(), plan, Rows())
    found = one_run_finding(plan, run, 0.01)
    assert run.steps == 60 and len(run.coins) == 725
    assert not found.violated and 0.5 < found.epsilon_lower < found.epsilon_claimed
    plan = dataclasses.replace(plan, noise_multiplier=3.0)
    broken = one_run_finding(plan, canary_run(module(), plan, Rows(), strategy=HalfNoise), 0.01)
    assert broken.violated, broken.statement


def test_scores_that_know_nothing_show_nothing() -> None:
    generator = np.random.default_rng(0)
    run = OneRun(2 * generator.integers(0, 2, 400) - 1, generator.normal(size=400), 10)
    found = one_run_finding(subject_of().plan, run, 0.01)
    assert found.epsilon_lower == 0.0 and not found.violated


def test_a_gradient_canary_is_as_long_as_the_claim() -> None:
    for options in (
        {},
        {"allocation": "global"},
        {"scaling": "joint"},
        {"scaling": "layerwise", "allocation": "optimal"},
    ):
        subject = subject_of(**options)
        length = float(subject.whitened(gradient_canary(subject)).norm())
        assert length == pytest.approx(1 / subject.plan.noise_multiplier, rel=1e-6)
    halved = subject_of(HalfTheSensitivity)
    assert float(halved.whitened(gradient_canary(halved)).norm()) == pytest.approx(2 / 0.8, rel=1e-6)
    assert isinstance(halved.mechanism, Mechanism) and math.isfinite(length)
