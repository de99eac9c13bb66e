"""Interrupted runs: what they repeat, what they count, and what they may never do."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from small_runs import SECRET, Crash, Gradients, fit, make_module, make_plan, weights
from torch import nn

from lipdp_lightning.callbacks import ResumeCheckpoint
from lipdp_lightning.layers import MaxMin
from lipdp_lightning.norms.follow import Follower
from lipdp_lightning.training import PrivateModule
from lipdp_lightning.training.step_record import StepRecord

LAST = "checkpoints/last.ckpt"
LONG = {"plan": make_plan(steps=120), "trainer_options": {"max_steps": 12}}  # with budget for a second branch


def adam_with_schedules(interval: str) -> type[PrivateModule]:
    class Scheduled(PrivateModule):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}

    return Scheduled


def session(directory: Path, *callbacks: Any, crash: int | None = None, every: int | None = 3, **options: Any) -> Any:
    """Start, or continue, the run of a directory; (module, trainer), or None after a crash."""
    directory.mkdir(exist_ok=True)
    keeper = ResumeCheckpoint(directory / "checkpoints", every_n_steps=every)
    checkpoint = directory / LAST if (directory / LAST).exists() else None
    crashes = [] if crash is None else [Crash(crash)]
    plan = options.pop("plan", None) or make_plan()
    arguments: dict[str, Any] = {"directory": directory, "checkpoint": checkpoint, **options}
    if crash is None:
        return fit(plan, *callbacks, keeper, **arguments)
    with pytest.raises(InterruptedError):
        fit(plan, *callbacks, *crashes, keeper, **arguments)
    return None


def total_spent(directory: Path) -> int:
    branches = json.loads((directory / "ledger.json").read_text())["branches"]
    return sum(b["reached"] - b["start"] + b.get("repeated", 0) for b in branches)


def chosen(case: str) -> dict[str, Any]:
    if case == "sgd":
        return {}
    module = make_module(kind=adam_with_schedules("epoch" if "epoch" in case else "step"))
    module._make_optimizer = None
    return {"module": module} | ({"physical_batch_size": 7} if "micro" in case else {})


def ended(run: Any) -> tuple[list[float], int, list[float]]:
    """Returns the weights, the number of steps and the learning rates at the end of a session."""
    module, trainer = run
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return weights(module).tolist(), trainer.global_step, rates


@pytest.fixture(scope="module")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, int], tuple[list[float], int, list[float]]]:
    """Returns the end of a run that nothing interrupts, by its case and its interval of checkpoints."""
    return lru_cache(lambda case, every: ended(session(tmp_path_factory.mktemp("run"), every=every, **chosen(case))))


# An epoch of the plan has three steps: crashes in the middle of one, at its end, and before the first step
@pytest.mark.parametrize("crash", [0, 2, 3, 6, 11])
@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("case", ["sgd", "adam, schedule by epoch, 3 micro-batches", "adam, schedule by step"])
def test_a_continued_run_ends_with_the_same_bits(
    uninterrupted: Any, tmp_path: Path, crash: int, every: int, case: str
) -> None:
    session(tmp_path / "run", every=every, crash=crash, **chosen(case))
    continued = ended(session(tmp_path / "run", every=every, **chosen(case)))
    assert continued == uninterrupted(case, every) and continued[1] == 12
    assert total_spent(tmp_path / "run") == 12


def test_two_crashes_and_a_changed_checkpoint_interval_by_time(tmp_path: Path) -> None:
    """Between two sessions nothing but the number of crashes differs."""
    whole, _ = session(tmp_path / "whole")
    session(tmp_path / "run", crash=5)
    session(tmp_path / "run", crash=8)
    module, _ = session(tmp_path / "run")
    assert torch.equal(weights(module), weights(whole))
    assert total_spent(tmp_path / "run") == 12


def test_layerwise_radius_and_exact_scalings_resume(tmp_path: Path) -> None:
    tracked = {"radius_quantile": 0.5, "radius_noise_multiplier": 5.0}
    for name in ("layerwise", "radius", "exact"):
        chosen = {"scaling": name} | ({} if name == "layerwise" else tracked)
        plan = make_plan(**chosen)
        whole, _ = session(tmp_path / f"{name}-whole", plan=plan)
        session(tmp_path / name, plan=plan, crash=5)
        module, _ = session(tmp_path / name, plan=plan)
        assert torch.equal(weights(module), weights(whole))


def test_a_replay_with_other_noise_scales_is_refused_and_then_becomes_a_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same draw at two scales: the difference of the two releases would give the noise, and so the true sum.

    Broken on purpose: the norms' bounds start anew from the weights in the checkpoint.
    """
    monkeypatch.setattr(Follower, "load_state", lambda self, state: None)

    def slow() -> dict[str, Any]:
        torch.manual_seed(0)
        wide = nn.Sequential(nn.Linear(6, 24), MaxMin(), nn.Linear(24, 20), MaxMin(), nn.Linear(20, 3))
        return {"module": make_module(rate=0.003, network=wide), **LONG}  # the norm of 24 x 20 lags behind its weights

    session(tmp_path, crash=6, every=4, **slow())
    with pytest.raises(ValueError, match=r"step 4 of this run was released before.*HINT"):
        session(tmp_path, **slow())
    assert torch.load(tmp_path / LAST, weights_only=False)["global_step"] == 4
    _, trainer = session(tmp_path, **slow())
    assert trainer.global_step == 12 and trainer.strategy.branches.count == 2
    # the first branch may have released all that it reserved
    assert trainer.strategy.branches.spent(12) == 50 + 12 - 4


def test_checkpoints_of_other_callbacks_are_repeated_too(tmp_path: Path) -> None:
    extra = ModelCheckpoint(tmp_path / "own", every_n_train_steps=1, save_top_k=-1)
    slow = {"trainer_options": {"max_steps": 12, "enable_checkpointing": True}, "plan": LONG["plan"]}
    session(tmp_path, extra, crash=7, every=4, module=make_module(rate=0.003), **slow)
    again = ModelCheckpoint(tmp_path / "again", every_n_train_steps=100)
    _, trainer = session(tmp_path, again, every=1, module=make_module(rate=0.003), **slow)
    assert trainer.global_step == 12 and trainer.strategy.branches.count == 1
    files = list((tmp_path / "own").iterdir())
    assert files and all(stat.S_IMODE(f.stat().st_mode) == 0o600 for f in files)


def test_a_stop_during_the_replay_forgets_no_step_that_was_released(tmp_path: Path) -> None:
    session(tmp_path, crash=8, every=3)
    session(tmp_path, every=1, trainer_options={"max_steps": 7})
    assert total_spent(tmp_path) >= 8
    whole, _ = session(tmp_path / "whole", every=3)
    module, _ = session(tmp_path, every=1)
    assert torch.equal(weights(module), weights(whole)) and total_spent(tmp_path) == 12


def test_a_save_and_a_resume_change_no_bit_of_what_follows(tmp_path: Path) -> None:
    """Slow weights: bounds are those of earlier ones at every save, and scale the noise of every later step."""
    whole, _ = session(tmp_path / "whole", every=None, module=make_module(rate=0.003), **LONG)
    for every in (1, 4):
        directory = tmp_path / str(every)
        session(directory, crash=6, every=every, module=make_module(rate=0.003), **LONG)
        module, trainer = session(directory, every=None, module=make_module(rate=0.003), **LONG)
        assert trainer.global_step == 12 and trainer.strategy.branches.count == 1
        assert torch.equal(weights(module), weights(whole))


def test_a_changed_learning_rate_draws_other_noise_and_counts_again(tmp_path: Path) -> None:
    first, second = Gradients(), Gradients()
    session(tmp_path, first, crash=8, every=5, module=make_module(rate=0.1), **LONG)
    _, trainer = session(tmp_path, second, every=5, module=make_module(rate=0.7), **LONG)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.7, "the new rate was ignored"
    # step 5 starts from the same weights: other sample, other noise
    assert (first.before_step[5] - second.before_step[0]).abs().max() > 1e-3
    branches = trainer.strategy.branches
    assert branches.count == 2 and branches.secret != SECRET
    assert branches.spent(12) == 50 + 12 - 5
    assert branches.limit() == 120 - 50 + 5


def test_a_branch_for_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    session(tmp_path, crash=8, every=5)
    with pytest.raises(ValueError, match=r"12 steps are spent.*HINT"):
        session(tmp_path, module=make_module(rate=0.7))
    _, trainer = session(tmp_path)
    assert trainer.global_step == 12 and trainer.strategy.branches.count == 1


def test_a_clean_stop_and_a_changed_learning_rate_cost_nothing(tmp_path: Path) -> None:
    session(tmp_path, trainer_options={"max_steps": 5})
    _, trainer = session(tmp_path, module=make_module(rate=0.7))
    assert trainer.strategy.branches.count == 2
    assert trainer.global_step == 12 and total_spent(tmp_path) == 12


def test_a_scheduled_learning_rate_continues_from_the_checkpoint(tmp_path: Path) -> None:
    def module(rate: float) -> PrivateModule:
        class Scheduled(PrivateModule):
            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=rate, momentum=0.1 if rate < 1 else 0.5)
                return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

        return make_module(kind=Scheduled)

    session(tmp_path, module=module(0.1), trainer_options={"max_steps": 3})
    _, trainer = session(tmp_path, module=module(7.0), trainer_options={"max_steps": 4})
    group = trainer.optimizers[0].param_groups[0]
    assert group["lr"] == pytest.approx(0.05) and group["momentum"] == 0.5


@pytest.mark.parametrize("change", ["data", "threads", "clip", "world"])
def test_what_decides_the_sum_is_in_the_context(tmp_path: Path, change: str) -> None:
    from small_runs import Blobs

    session(tmp_path, trainer_options={"max_steps": 5})
    options: dict[str, Any] = {}
    threads = torch.get_num_threads()
    if change == "data":

        class Fewer(Blobs):
            def load_train(self) -> Any:
                x, y = super().load_train()
                return x[:-1], y[:-1]

        options["data"] = Fewer()
    if change == "threads":
        torch.set_num_threads(threads + 1)
    if change == "clip":
        options["trainer_options"] = {"gradient_clip_val": 0.1}
    if change == "world":
        options["physical_batch_size"] = 10
    try:
        _, trainer = session(tmp_path, **options)
    finally:
        torch.set_num_threads(threads)
    assert trainer.strategy.branches.count == 2 and trainer.strategy.branches.secret != SECRET


def test_a_copied_directory_takes_a_new_secret_and_counts_both(tmp_path: Path) -> None:
    session(tmp_path / "run", crash=8, every=5, **LONG)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    _, trainer = session(tmp_path / "copy", **LONG)
    assert trainer.strategy.branches.count == 2 and trainer.strategy.branches.secret != SECRET
    assert trainer.strategy.branches.spent(12) == 50 + 12 - 5
    _, original = session(tmp_path / "run", **LONG)
    assert original.strategy.branches.count == 1 and original.strategy.branches.secret == SECRET


def test_the_checkpoint_exists_before_the_first_step_and_is_its_owners(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        session(tmp_path, crash=0)
    finally:
        os.umask(old)
    saved = torch.load(tmp_path / LAST, weights_only=False)
    assert saved["global_step"] == 0 and saved["lipdp"]["secret"] == SECRET
    assert stat.S_IMODE((tmp_path / LAST).stat().st_mode) == 0o600
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]


def test_the_ledger_is_written_before_the_step(tmp_path: Path) -> None:
    """A crash right after a step leaves a record that has it, however rarely checkpoints are taken."""
    session(tmp_path, crash=1, every=None)
    assert total_spent(tmp_path) >= 1
    lines = [line.split() for line in (tmp_path / "steps.txt").read_text().splitlines()]
    assert [step for _, step, _ in lines] == ["0"]


def test_without_its_checkpoint_a_run_starts_again_within_what_is_left(tmp_path: Path) -> None:
    session(tmp_path, trainer_options={"max_steps": 5})
    (tmp_path / LAST).unlink()
    _, trainer = session(tmp_path)
    assert trainer.global_step == 7
    assert total_spent(tmp_path) == 12


def test_the_strategy_itself_stops_at_the_budget(tmp_path: Path) -> None:
    """Without PrivacyAccountant, and with min_steps asking for more."""
    session(tmp_path, trainer_options={"max_steps": 5})
    (tmp_path / LAST).unlink()
    keeper = ResumeCheckpoint(tmp_path / "checkpoints")
    _, trainer = fit(make_plan(), keeper, directory=tmp_path, trainer_options={"min_steps": 12})
    assert trainer.global_step == 7


def test_another_plan_is_refused(tmp_path: Path) -> None:
    session(tmp_path, trainer_options={"max_steps": 5})
    with pytest.raises(ValueError, match="another privacy plan"):
        session(tmp_path, plan=make_plan(noise_multiplier=1.5))


def test_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    session(tmp_path, trainer_options={"max_steps": 5})
    with pytest.raises(ValueError, match=r"another model: \d+ tensors differ.*HINT"):
        session(tmp_path, module=make_module(network=torch.nn.Sequential(torch.nn.Linear(6, 3))))


def test_weights_only_checkpoints_hold_no_secret(tmp_path: Path) -> None:
    _, trainer = session(tmp_path)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "lipdp" not in torch.load(tmp_path / "weights.ckpt", weights_only=False)
    assert SECRET not in (tmp_path / "weights.ckpt").read_bytes()


# ---- the record of steps

A, B = "a" * 16, "b" * 16
D, E = "d" * 32, "e" * 32


def test_the_record_knows_a_replay_from_another_release(tmp_path: Path) -> None:
    path = tmp_path / "steps.txt"
    record = StepRecord(path)
    record.take(A, 0, D)
    record.take(A, 1, E)
    again = StepRecord(path)
    again.take(A, 0, D)
    again.take(B, 0, E)  # another secret: another sample
    with pytest.raises(ValueError, match="HINT"):
        again.take(A, 1, D)
    assert StepRecord(path).divergences == 1


def test_a_torn_line_loses_no_later_step(tmp_path: Path) -> None:
    path = tmp_path / "steps.txt"
    StepRecord(path).take(A, 0, D)
    with open(path, "a") as file:
        file.write(f"{A} 1 dd")
    record = StepRecord(path)
    record.take(A, 1, E)
    reread = StepRecord(path)
    with pytest.raises(ValueError, match="step 1 "):
        reread.take(A, 1, D)
