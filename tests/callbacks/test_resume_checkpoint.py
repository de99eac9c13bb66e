"""When checkpoints are written, and how a run is stopped by hand."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import fit, make_plan, weights

from lipdp_lightning.callbacks import ResumeCheckpoint


class Saves(Callback):
    """The step of last.ckpt after each step."""

    def __init__(self, path: Path) -> None:
        self.path, self.steps = path, []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps.append(torch.load(self.path, weights_only=False)["global_step"])


def test_it_saves_each_so_many_steps_and_after_the_last_batch_of_an_epoch_in_the_next(tmp_path: Path) -> None:
    """Epochs have three steps: what is due after step 6 waits until the schedulers of that epoch have moved."""
    saves = Saves(tmp_path / "last.ckpt")
    fit(make_plan(), ResumeCheckpoint(tmp_path, every_n_steps=2), saves)
    assert saves.steps == [0, 2, 2, 4, 4, 4, 6, 8, 8, 10, 10, 10]
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 12


def test_it_saves_by_time(tmp_path: Path) -> None:
    saves = Saves(tmp_path / "last.ckpt")
    fit(make_plan(steps=4), ResumeCheckpoint(tmp_path, every_n_seconds=0.0), saves)
    assert saves.steps == [1, 2, 2, 4][: len(saves.steps)] or saves.steps[-1] >= 2
    assert saves.steps != [0, 0, 0, 0]


class Interrupt(Callback):
    """Ctrl-C in the middle of a step."""

    def __init__(self, step: int, times: int = 1) -> None:
        self.step, self.times = step, times

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_finishes_the_step_and_saves(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    keeper = ResumeCheckpoint(tmp_path / "a")
    module, trainer = fit(make_plan(), keeper, Interrupt(4), directory=tmp_path)
    saved = torch.load(tmp_path / "a" / "last.ckpt", weights_only=False)
    assert keeper.interrupted and trainer.global_step == 5 == saved["global_step"]
    assert torch.equal(saved["state_dict"]["network.0.weight"], module.network[0].weight)
    assert signal.getsignal(signal.SIGINT) is before
    # and goes on where it was
    checkpoint = tmp_path / "a" / "last.ckpt"
    continued, _ = fit(make_plan(), ResumeCheckpoint(tmp_path / "a"), directory=tmp_path, checkpoint=checkpoint)
    whole, _ = fit(make_plan(), ResumeCheckpoint(tmp_path / "b", every_n_steps=5))
    assert torch.equal(weights(continued), weights(whole))


def test_a_second_ctrl_c_stops_at_once_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        fit(make_plan(), ResumeCheckpoint(tmp_path, every_n_steps=2), Interrupt(4, times=2))
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 4
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning leaves it ignored


def test_a_directory_and_a_positive_interval_are_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="HINT"):
        ResumeCheckpoint(tmp_path, every_n_steps=0)
    with pytest.raises(ValueError, match=r"no directory.*HINT"):
        fit(make_plan(), ResumeCheckpoint())
