"""A private run of one process in a notebook or a Python prompt, where Lightning starts no processes."""

from __future__ import annotations

import lightning
import pytest
import small_runs
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors import accelerator_connector

from lipdp_lightning.training import PrivateStrategy


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Lightning takes an interactive session by, in a process that a launcher did not start."""
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    for name in ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)


def trainer(strategy: DDPStrategy, devices: int, steps: int = 2) -> lightning.Trainer:
    return lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_steps=steps, max_epochs=-1,
        use_distributed_sampler=False, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip


def test_one_process_trains_at_a_prompt(prompt: None) -> None:
    plan = small_runs.make_plan(steps=2)
    private = trainer(PrivateStrategy(plan), devices=1)
    private.fit(small_runs.make_module(), datamodule=small_runs.Blobs())
    assert private.global_step == 2 and private.world_size == 1


def test_lightnings_own_strategy_does_not(prompt: None) -> None:
    """Shows that the session is one in which Lightning refuses a launcher."""
    with pytest.raises(MisconfigurationException, match="interactive"):
        trainer(DDPStrategy(), devices=1)


def test_several_processes_are_refused_at_a_prompt(prompt: None) -> None:
    with pytest.raises(MisconfigurationException, match="interactive"):
        trainer(PrivateStrategy(small_runs.make_plan(steps=2)), devices=2)


def test_several_processes_of_a_script_have_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert trainer(PrivateStrategy(small_runs.make_plan(steps=2)), devices=2).strategy.launcher is not None
