"""Mix-up training: the clipping function, or the scaling, changes once, and the ledger does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clipped_steps import ClippedSteps, clip_plan, loud_batch
from private_step import (
    Harness,
    Noiseless,
    influential_examples,
    mahalanobis,
    make_network,
    make_plan,
    random_batch,
    with_example,
)
from small_runs import fit
from small_runs import make_plan as small_plan

from lipdp_lightning.mechanism.radii import scaling_of
from lipdp_lightning.mechanism.scaling import StepNumbers
from lipdp_lightning.mechanism.step import Mechanism

PAIRS = [("joint", "layerwise"), ("layerwise", "worst_case"), ("worst_case", "joint")]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_ledger_is_that_of_a_run_without_a_switch(first: str, second: str) -> None:
    plain = make_plan(scaling=first)
    switched = make_plan(scaling=first, switch_at=0.5, switch_to=second)
    assert plain.events() == switched.events()
    assert [switched.influence_at(s).name for s in (0, 24, 25, 49)] == [first, first, second, second]


def test_clipping_switches_at_its_step() -> None:
    plan = clip_plan("clip_flat", "local", switch_at=0.95, switch_to="global")
    assert [plan.influence_at(s).clipping for s in (0, 47, 48, 49)] == ["local", "local", "global", "global"]
    network, shape = make_network("mlp", gain=5.0)
    steps = ClippedSteps(network, shape, plan)
    batch = loud_batch(shape, 5)
    before, after = steps.release(batch, 47), steps.release(batch, 48)
    alone = ClippedSteps(steps.module.network, shape, clip_plan("clip_flat", "global")).release(batch)
    assert not torch.equal(before["all layers"], after["all layers"])
    assert torch.equal(after["all layers"], alone["all layers"])


def largest(kind: type[Mechanism], first: str, second: str, step: int, name: str = "mlp", gain: float = 2.0) -> float:
    network, shape = make_network(name, gain=gain)
    plan = make_plan(scaling=first, switch_at=0.5, switch_to=second, max_norm=None)
    harness = Harness(network, shape, plan, kind=kind)
    batch = random_batch(5, shape, 5)
    examples = influential_examples(harness, 5, steps=4)
    without = harness.release(batch, step)
    found = [mahalanobis(harness.release(with_example(batch, *e), step), without, harness.mechanism.deviations())
             for e in examples]  # fmt: skip
    return max(found) * plan.noise_multiplier**2


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("step", [24, 25])
def test_each_step_keeps_the_joint_condition(first: str, second: str, step: int) -> None:
    assert 0 < largest(Noiseless, first, second, step) <= 1


class KeepsTheOldNoise(Noiseless):
    """Scales with the second scaling, and draws its noise for the first."""

    def numbers(self) -> StepNumbers:
        return scaling_of(self.plan, 0, self.certificate).numbers(self.certificate)


def test_noise_of_the_other_scaling_is_caught() -> None:
    assert largest(KeepsTheOldNoise, "layerwise", "worst_case", 24, "linear", 30.0) <= 1
    assert largest(KeepsTheOldNoise, "layerwise", "worst_case", 25, "linear", 30.0) > 1.1
    assert largest(Noiseless, "layerwise", "worst_case", 25, "linear", 30.0) <= 1


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_run_switches_and_its_scalers_with_it(first: str, second: str) -> None:
    options: dict[str, Any] = {"switch_at": 0.5, "switch_to": second}
    _, trainer = fit(small_plan(scaling=first, **options))
    assert trainer.strategy.mechanism.scaling.name == second
