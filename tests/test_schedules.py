"""Learning rates over the steps of a plan, in Python and by configuration, and across interruptions."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback
from small_runs import SECRET, Crash, weights
from torch import nn

from lipdp_lightning.callbacks import PrivacyReport
from lipdp_lightning.experiment.experiment import parse_experiment
from lipdp_lightning.schedules import WarmupCosine, WarmupLinear
from lipdp_lightning.training.run_directory import RunDirectory

QUICKSTART = Path(__file__).parents[1] / "configs/quickstart.yaml"
STEPS = 12


def optimizer(rate: float = 0.4) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)


def rates(schedule: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return found


def test_a_rise_and_a_fall_over_all_steps() -> None:
    linear = rates(WarmupLinear(optimizer(), warmup=0.25, final=0.1, total_steps=12), 12)
    assert linear[:3] == pytest.approx([0.1, 0.2, 0.3]) and linear[3] == pytest.approx(0.4)
    assert linear[-1] == pytest.approx(0.04)
    falls = [a - b for a, b in itertools.pairwise(linear[3:])]
    assert min(falls) == pytest.approx(max(falls))
    cosine = rates(WarmupCosine(optimizer(), warmup=0.0, total_steps=5), 5)
    assert cosine == pytest.approx([0.4 * 0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(5)])
    assert rates(WarmupCosine(optimizer(), total_steps=1), 1) == pytest.approx([0.2])


def test_the_number_of_steps_can_come_later() -> None:
    late = WarmupCosine(optimizer(), warmup=0.5)
    late.plan_steps(8)
    assert rates(late, 8) == rates(WarmupCosine(optimizer(), warmup=0.5, total_steps=8), 8)
    given = WarmupCosine(optimizer(), total_steps=4)
    given.plan_steps(8)
    assert given.total_steps == 4
    unknown = WarmupLinear(optimizer())
    with pytest.raises(ValueError, match=r"how many steps.*HINT"):
        rates(unknown, 2)


@pytest.mark.parametrize("bad", [{"warmup": 1.0}, {"final": -0.1}, {"total_steps": 0}])
def test_shares_are_shares(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="HINT"):
        WarmupCosine(optimizer(), **bad)


# ---- by configuration

PLANNED = {"class_path": "lipdp_lightning.schedules.WarmupCosine", "init_args": {"warmup": 0.3}}
TORCH = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1, "gamma": 0.5}}
COSINE = WarmupCosine(optimizer(), 0.3, 0.0, STEPS)
RUNS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "planned": ({"lr_scheduler": PLANNED}, [0.05 * COSINE.factor(step) for step in range(STEPS)]),
    # an epoch of this plan has six steps
    "by epoch": ({"lr_scheduler": TORCH}, [0.05] * 6 + [0.025] * 6),
    "by step": ({"lr_scheduler": TORCH, "lr_interval": "step"}, [0.05 * 0.5**i for i in range(STEPS)]),
}  # fmt: skip


class Rates(Callback):
    def __init__(self) -> None:
        self.used: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.used.append(optimizer.param_groups[0]["lr"])


def arguments(tmp_path: Path, case: str) -> list[str]:
    file = tmp_path / "schedule.yaml"
    file.write_text(yaml.safe_dump(RUNS[case][0]))
    return [
        "--config", str(QUICKSTART), "--config", str(file), "--privacy.epsilon", "null", "--privacy.epochs", "null",
        "--privacy.noise_multiplier", "1.5", "--privacy.steps", str(STEPS), "--privacy.accountant", "rdp",
        "--privacy.physical_batch_size", "100", "--trainer.limit_val_batches", "0",
    ]  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_the_rates_of_a_configured_run(tmp_path: Path, case: str) -> None:
    """Three micro-batches make a step, and a rate is that of a step."""
    experiment, seen = parse_experiment(arguments(tmp_path, case), None, "off"), Rates()
    experiment.trainer.callbacks.append(seen)
    experiment.trainer.fit(experiment.model, datamodule=experiment.datamodule)
    assert experiment.trainer.strategy.chunks == 3
    assert seen.used == pytest.approx(RUNS[case][1])


def final_weights(tmp_path: Path, case: str, crash: int | None) -> torch.Tensor:
    """Of `lipdp fit` with a fixed secret and no report, after an interruption."""
    run = tmp_path / f"run{crash}"
    for crashes in [None] if crash is None else [crash, None]:
        experiment = parse_experiment(arguments(tmp_path, case), RunDirectory(run), "off")
        trainer, checkpoint = experiment.trainer, experiment.claim()
        trainer.strategy.fixed_secret = SECRET
        trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, PrivacyReport)]
        if crashes is not None:
            trainer.callbacks.insert(0, Crash(crashes))
        with nullcontext() if crashes is None else pytest.raises(InterruptedError):
            trainer.fit(experiment.model, datamodule=experiment.datamodule, ckpt_path=checkpoint, weights_only=False)
        experiment.release()
    assert trainer.global_step == STEPS and trainer.strategy.branches.count == 1
    return weights(experiment.model)


@pytest.mark.parametrize("case", ["planned", pytest.param("by step", marks=pytest.mark.slow)])
def test_an_interrupted_run_with_a_schedule_ends_with_the_same_bits(tmp_path: Path, case: str) -> None:
    """The last checkpoint before the crash is that of step 10."""
    assert torch.equal(final_weights(tmp_path, case, 11), final_weights(tmp_path, case, None))
