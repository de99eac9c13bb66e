"""Saves a run when the batch system takes its machine away, and has it started again."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from lipdp_lightning.callbacks.accountant import _strategy
from lipdp_lightning.callbacks.resume_checkpoint import ResumeCheckpoint
from lipdp_lightning.callbacks.run_files import RunFiles
from lipdp_lightning.slurm import environment as slurm
from lipdp_lightning.slurm.signals import SignalFlag, listen, restore

_INTERRUPTED = 130
_TERMINATED = 128 + signal.SIGTERM


class Preempted(SystemExit):
    """Raised when the run was saved at a step boundary and stops; the process must exit with ``code``.

    With 0, the job is in the queue again. With ``EXIT_REQUEUE``, the batch script must requeue it. With any other code,
    the run can be continued, and was not requeued.
    """


class Preemption(Callback):
    """Saves the run at the next step boundary after SIGUSR1, requeues its Slurm job and stops.

    A signal to any rank counts for all of them: the handler sets a flag, and
    the ranks compare their flags after each step and before the first. The checkpoint is that of
    :class:`ResumeCheckpoint`, so the run keeps its directory, secret, ledger and W&B id. Under Slurm, SIGTERM does the
    same, except that a job which was cancelled is not requeued. Outside Slurm, the run is saved and stops.

    Args:
        requeue: whether to ask Slurm to start the job again; False leaves that to the batch system.
    """

    def __init__(self, requeue: bool = True) -> None:
        self.requeue = requeue
        self.stopped: Preempted | None = None
        self._flag = SignalFlag()
        self._handlers: dict[int, Any] = {}
        self._terminated = False

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if callbacks.index(self) < callbacks.index(_keeper(trainer)):
            raise ValueError(
                "Preemption stands before ResumeCheckpoint, and would save a step that has not ended for it. "
                "HINT: put Preemption last."
            )
        # Lightning keeps a handler that exists when training starts; its own would save in the middle of a step
        self._flag, self._handlers = listen([signal.SIGUSR1])
        self.stopped = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if slurm.job_id() is not None and threading.current_thread() is threading.main_thread():
            # Lightning would wrap an earlier handler into one that broadcasts from the handler, so this one is set
            # only now; when training ends, Lightning restores the handler that it found
            signal.signal(signal.SIGTERM, self._flag)
            self._flag.terminated |= trainer.received_sigterm
        self._stop_if_asked(trainer)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if _strategy(trainer).between_steps:
            self._stop_if_asked(trainer)

    def _stop_if_asked(self, trainer: lightning.Trainer) -> None:
        preempted, terminated = _strategy(trainer).ranks.voted(self._flag.preempted, self._flag.terminated)
        branches = _strategy(trainer).branches
        done = trainer.global_step >= min(branches.limit(), trainer.max_steps)
        if done or not (preempted or terminated):
            return
        if trainer.is_global_zero:
            branches.finish(trainer.global_step)
        _keeper(trainer).save(trainer)
        self._terminated = terminated and not preempted
        self.stopped = Preempted(0)
        raise self.stopped

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        if exception is self.stopped and self.stopped is not None:
            self._leave(trainer, self.stopped)
            self._flag.preempted = self._flag.terminated = False  # for the next run of this process
        self._stop_listening()

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        self._stop_listening()

    def _stop_listening(self) -> None:
        restore(self._handlers)
        self._handlers = {}

    def _leave(self, trainer: lightning.Trainer, stopped: Preempted) -> None:
        """Ends a saved run: marks its record and W&B run, and asks Slurm to requeue the job."""
        job = slurm.job_id()
        fate: slurm.Fate = "end"
        if job is not None and self.requeue:
            fate = slurm.fate_after_sigterm(job) if self._terminated else "requeue"
        if fate == "requeue" and not slurm.can_requeue():
            stopped.code = slurm.EXIT_REQUEUE
        elif fate == "end":
            stopped.code = _TERMINATED if self._terminated else 0 if job is not None else _INTERRUPTED
        if not trainer.is_global_zero:
            if job is None:
                stopped.code = 0  # with another code, Lightning would kill rank 0, which still writes
            return
        status = "stopped" if fate == "end" else "preempted"
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RunFiles):
                callback.mark(trainer, status)
        for logger in trainer.loggers:
            # reading logger.experiment would start a W&B run if there is none yet
            run: Any = getattr(logger, "_experiment", None)
            if hasattr(run, "mark_preempting"):
                run.mark_preempting()
                run.finish(exit_code=1)  # with code 0, W&B would show the run as finished
        sys.stderr.write(f"{status} at step {trainer.global_step}, with a checkpoint\n")
        if fate == "requeue" and slurm.can_requeue():
            assert job is not None
            try:
                slurm.requeue(job)
            except RuntimeError as error:
                sys.stderr.write(f"job {job} was not requeued: {error}. HINT: submit it again with the same run_dir.\n")
                stopped.code = 1


def _keeper(trainer: lightning.Trainer) -> ResumeCheckpoint:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ResumeCheckpoint):
            return callback
    raise ValueError(
        "Preemption has nothing to save with: the trainer has no ResumeCheckpoint. "
        "HINT: use callbacks=[ResumeCheckpoint('runs/mine/checkpoints'), Preemption()]."
    )
