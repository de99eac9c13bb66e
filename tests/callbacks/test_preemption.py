"""A run that is told to make way: where it stops, what it leaves, what it asks Slurm, and what it ends as."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import fit, make_plan, weights

from lipdp_lightning.callbacks import Preempted, Preemption, ResumeCheckpoint, RunFiles
from lipdp_lightning.slurm.signals import SignalFlag, listen
from lipdp_lightning.training.run_directory import RunDirectory

LAST = Path("checkpoints") / "last.ckpt"


class Send(Callback):
    """A signal in the middle of a step."""

    def __init__(self, step: int, number: int = signal.SIGUSR1) -> None:
        self.step, self.number = step, number

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name, which writes down what it is asked and answers what the test has put in a file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\ncat {folder}/answer\nexit $(cat {folder}/code)\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (folder / "answer").write_text("")
    (folder / "code").write_text("0")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    return folder


def asked(folder: Path) -> list[str]:
    file = folder / "asked"
    return file.read_text().splitlines() if file.exists() else []


def run(directory: Path, *callbacks: Any, preemption: Preemption | None = None, **options: Any) -> Any:
    """Start or continue the run of a directory."""
    directory.mkdir(exist_ok=True, parents=True)
    keeper = ResumeCheckpoint(directory / "checkpoints")
    watched = [c(keeper) if callable(c) else c for c in callbacks]
    last = directory / LAST
    plan, taken = make_plan(), RunDirectory(directory)
    taken.claim(plan.digest().hex(), plan.to_dict(), "")
    try:
        return fit(
            plan, keeper, *watched, RunFiles(taken), preemption or Preemption(),
            directory=directory, checkpoint=last if last.exists() else None, **options,
        )  # fmt: skip
    finally:
        taken.release()


def stopped(directory: Path, *callbacks: Any, **options: Any) -> int:
    """Exit code of a run that has to stop."""
    with pytest.raises(Preempted) as found:
        run(directory, *callbacks, **options)
    assert isinstance(found.value.code, int)
    return found.value.code


def status(directory: Path) -> str:
    record = RunDirectory(directory).record()
    assert record is not None
    return str(record["status"])


# ---- the step at which it stops


@pytest.mark.parametrize("step", [0, 4, 5])
def test_it_stops_at_the_end_of_the_step_and_goes_on_from_there(tmp_path: Path, step: int) -> None:
    assert stopped(tmp_path / "a", Send(step)) == 130
    saved = torch.load(tmp_path / "a" / LAST, weights_only=False)
    assert saved["global_step"] == step + 1 and status(tmp_path / "a") == "stopped"
    module, trainer = run(tmp_path / "a")
    whole, _ = run(tmp_path / "b")
    assert torch.equal(weights(module), weights(whole)) and trainer.global_step == 12
    assert trainer.strategy.branches.count == 1 and status(tmp_path / "a") == "finished"
    assert len((tmp_path / "a" / "steps.txt").read_text().splitlines()) == 12


class SavesInTheHandler(Callback):
    """What Lightning does by itself: the checkpoint is taken where the signal comes."""

    def __init__(self, keeper: ResumeCheckpoint) -> None:
        self.keeper = keeper

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: self.keeper.save(trainer))


class BetweenUpdates(Callback):
    """A signal between the updates of two parameters."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(self._hook(trainer, pl_module))

    def _hook(self, trainer: Any, module: Any) -> Any:
        def fire(optimizer: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                first = next(module.parameters())
                before = first.detach().clone()
                first.data.add_(1.0)  # an update that is half done
                os.kill(os.getpid(), signal.SIGUSR1)
                first.data.copy_(before)

        return fire


@pytest.mark.parametrize("broken", [False, True])
def test_a_signal_in_the_middle_of_an_update_tears_nothing(tmp_path: Path, broken: bool) -> None:
    if broken:
        run(tmp_path, lambda keeper: SavesInTheHandler(keeper), BetweenUpdates(), lambda keeper: Copy(tmp_path))
    else:
        stopped(tmp_path, BetweenUpdates(), lambda keeper: Copy(tmp_path))
    saved = torch.load(tmp_path / ("torn.ckpt" if broken else LAST), weights_only=False)
    whole, _ = run(tmp_path / "whole", trainer_options={"max_steps": saved["global_step"]})
    same = all(torch.equal(v, saved["state_dict"][k]) for k, v in whole.state_dict().items() if k.startswith("network"))
    assert same is not broken


class Copy(Callback):
    """Keeps the checkpoint that was written in the middle of step 4."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            (self.folder / "torn.ckpt").write_bytes((self.folder / LAST).read_bytes())


def test_a_signal_before_training_takes_no_step(tmp_path: Path) -> None:
    class Early(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            os.kill(os.getpid(), signal.SIGUSR1)

    listen([signal.SIGUSR1])  # as lipdp fit does before its imports
    stopped(tmp_path, Early())
    assert torch.load(tmp_path / LAST, weights_only=False)["global_step"] == 0
    _, trainer = run(tmp_path)
    assert trainer.global_step == 12, "the flag of the first run must not stop the second one"


def test_a_signal_in_the_last_step_lets_the_run_finish(tmp_path: Path) -> None:
    _, trainer = run(tmp_path, Send(11))
    assert trainer.global_step == 12 and status(tmp_path) == "finished"


def test_it_stops_whatever_min_steps_says_and_without_another_validation(tmp_path: Path) -> None:
    class Validations(Callback):
        count = 0

        def on_validation_start(self, *_: Any) -> None:
            Validations.count += 1

    options = {"min_steps": 12, "limit_val_batches": 1.0, "check_val_every_n_epoch": 3}
    stopped(tmp_path, Send(4), Validations(), trainer_options=options)
    assert torch.load(tmp_path / LAST, weights_only=False)["global_step"] == 5 and Validations.count == 0


def test_the_handlers_of_before_are_back_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    numbers = (signal.SIGUSR1, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    run(tmp_path)
    assert [signal.getsignal(number) for number in numbers] == before
    flag, _ = listen([signal.SIGUSR1])
    run(tmp_path / "again")
    assert signal.getsignal(signal.SIGUSR1) is flag, "a flag of the command goes on listening"


def test_it_needs_a_resume_checkpoint_before_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="HINT: use callbacks="):
        fit(make_plan(), Preemption(), directory=tmp_path)
    with pytest.raises(ValueError, match="HINT: put Preemption last"):
        fit(make_plan(), Preemption(), ResumeCheckpoint(tmp_path), directory=tmp_path)


# ---- what Slurm is asked


def test_the_job_is_requeued_after_everything_is_written(tmp_path: Path, scontrol: Path) -> None:
    assert stopped(tmp_path / "run", Send(4)) == 0
    assert asked(scontrol) == ["requeue 17"] and status(tmp_path / "run") == "preempted"
    assert os.stat(scontrol / "asked").st_mtime_ns >= os.stat(tmp_path / "run" / "run.json").st_mtime_ns
    run(tmp_path / "run")
    assert status(tmp_path / "run") == "finished"


def test_a_task_of_an_array_requeues_itself(tmp_path: Path, scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "16")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    stopped(tmp_path / "run", Send(4))
    assert asked(scontrol) == ["requeue 16_3"]


def test_a_requeue_that_is_refused_is_an_error(
    tmp_path: Path, scontrol: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (scontrol / "code").write_text("1")
    (scontrol / "answer").write_text("Job can not be requeued")
    assert stopped(tmp_path / "run", Send(4)) == 1
    assert "Job can not be requeued. HINT" in capsys.readouterr().err


def test_without_scontrol_the_batch_script_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stopped(tmp_path / "run", Send(4)) == 75 and status(tmp_path / "run") == "preempted"


@pytest.mark.parametrize(
    ("answer", "code", "requeues", "ends_as"),
    [
        ("JobId=17 JobState=RUNNING PreemptTime=2026-01-01T00:00:00 Restarts=0", 0, True, "preempted"),
        ("JobId=17 JobState=RUNNING PreemptTime=None Restarts=0", 143, False, "stopped"),
        ("JobId=17 JobState=CANCELLED PreemptTime=None", 143, False, "stopped"),
        ("JobId=17 JobState=CANCELLED PreemptTime=2026-01-01T00:00:00", 143, False, "stopped"),
        ("JobId=17 JobState=PENDING PreemptTime=None", 0, False, "preempted"),
        ("slurm_load_jobs error", 143, False, "stopped"),
    ],
)
def test_sigterm_is_a_requeue_only_for_a_job_that_makes_way(
    tmp_path: Path, scontrol: Path, answer: str, code: int, requeues: bool, ends_as: str
) -> None:
    (scontrol / "answer").write_text(answer)
    assert stopped(tmp_path / "run", Send(4, signal.SIGTERM)) == code
    assert ("requeue 17" in asked(scontrol)) is requeues and status(tmp_path / "run") == ends_as
    assert torch.load(tmp_path / "run" / LAST, weights_only=False)["global_step"] == 5


def test_requeue_can_be_left_to_the_batch_system(tmp_path: Path, scontrol: Path) -> None:
    assert stopped(tmp_path / "run", Send(4), preemption=Preemption(requeue=False)) == 0
    assert asked(scontrol) == []


def test_a_live_run_of_wandb_is_marked(tmp_path: Path, scontrol: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    calls: list[Any] = []

    class Run:
        def save(self) -> None:
            pass

        def mark_preempting(self) -> None:
            calls.append("preempting")

        def finish(self, exit_code: int = 0) -> None:
            calls.append(exit_code)

    logger = CSVLogger(tmp_path)
    logger._experiment = Run()  # type: ignore[assignment]
    logger.finalize = lambda status: None  # type: ignore[method-assign]
    logger.log_hyperparams = lambda *_: None  # type: ignore[method-assign]
    stopped(tmp_path / "run", Send(4), trainer_options={"logger": logger, "log_every_n_steps": 1000})
    assert calls == ["preempting", 1]


# ---- flags


def test_a_flag_tells_the_signals_apart_and_is_taken_over() -> None:
    flag, before = listen([signal.SIGUSR1, signal.SIGTERM])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0)
    assert (flag.preempted, flag.terminated) == (False, True) and set(before) == {signal.SIGUSR1, signal.SIGTERM}
    same, _ = listen([signal.SIGUSR1])
    assert same is flag and isinstance(signal.getsignal(signal.SIGUSR1), SignalFlag)


# ---- several ranks

_RANKS = """
import os, signal, sys, time
sys.path[:0] = {paths!r}
from pathlib import Path
from lightning.pytorch.callbacks import Callback
from lipdp_lightning.callbacks import Preemption, ResumeCheckpoint, RunFiles
from lipdp_lightning.training.processes import Ranks
from lipdp_lightning.training.run_directory import RunDirectory
from small_runs import fit, make_plan

folder = Path({folder!r})

class Behind(Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_rank == 1:
            time.sleep(0.02)
            if trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGUSR1)
                (folder / "sent").touch()

if {broken!r}:
    Ranks.voted = lambda ranks, *votes: list(votes)
last = folder / "checkpoints" / "last.ckpt"
plan, taken = make_plan(), RunDirectory(folder)
if os.environ.get("LOCAL_RANK", "0") == "0":
    taken.claim(plan.digest().hex(), plan.to_dict(), "")
fit(plan, ResumeCheckpoint(folder / "checkpoints"), Behind(), RunFiles(taken), Preemption(),
    directory=folder, checkpoint=last if last.exists() else None, trainer_options={{"devices": 2}})
"""


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_one_rank_alone_gets_the_signal(tmp_path: Path, broken: bool) -> None:
    """It counts for both; without the agreement, one rank leaves and the other one waits for it or dies."""
    import subprocess

    folder = tmp_path / "run"
    folder.mkdir()
    tests = Path(__file__).parents[1]
    script = tmp_path / "ranks.py"
    script.write_text(_RANKS.format(paths=[str(tests), str(tests.parent)], broken=broken, folder=str(folder)))
    # a run of this process has left its own there, and Lightning launches ranks only where there are none
    launched = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in launched and not k.startswith("SLURM")}
    environment |= {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        patience = time.monotonic() + 300
        while not (folder / "sent").exists() and process.poll() is None and time.monotonic() < patience:
            time.sleep(0.1)
        _, complaint = process.communicate(timeout=10 if broken else 120)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        code, complaint = None, ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if broken:
        assert (folder / "sent").exists() and code not in (0, 130)
        return
    assert code == 130, complaint[-2000:]
    assert torch.load(folder / "checkpoints" / "last.ckpt", weights_only=False)["global_step"] == 5
    assert status(folder) == "stopped"
