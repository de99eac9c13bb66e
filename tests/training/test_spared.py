"""Sections of a step cost nothing where no profiler was asked for, and are measured where one was."""

from __future__ import annotations

from lightning.pytorch.profilers import SimpleProfiler
from small_runs import fit, make_plan

from lipdp_lightning.training.spared import Unprofiled


def test_a_profiler_that_was_asked_for_is_kept() -> None:
    profiler = SimpleProfiler()
    _, trainer = fit(make_plan(steps=2), trainer_options={"profiler": profiler})
    assert trainer.profiler is profiler
    assert len(profiler.recorded_durations["run_training_batch"]) == 2


def test_without_one_nothing_is_measured() -> None:
    _, trainer = fit(make_plan(steps=2))
    assert type(trainer.profiler) is Unprofiled and trainer.global_step == 2
    trainer.profiler.start("anything")
    with trainer.profiler.profile("anything"):
        pass
    assert trainer.profiler.summary() == ""
