"""Reads what a process can know of its Slurm job, and sends requests to the controller."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Literal

# EX_TEMPFAIL of sysexits.h: the run is saved, and the batch script must requeue the job because this process cannot
EXIT_REQUEUE = 75

Fate = Literal["requeue", "requeued", "end"]


def job_id() -> str | None:
    """Returns the job's name for scontrol, ARRAY_TASK for a task of an array; None outside Slurm."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID")


def in_step() -> bool:
    """Returns whether srun has started this process."""
    return "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ and "SLURM_JOB_ID" in os.environ


def restarted() -> bool:
    """Returns whether the job runs again, after a requeue or because a node failed."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def task_problems(devices: int | None = None, nodes: int | None = None) -> list[str]:
    """Returns the reasons why srun's processes and the trainer's cannot be the same."""
    if not in_step() or os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return []
    tasks, per_node = os.environ.get("SLURM_NTASKS", "1"), os.environ.get("SLURM_NTASKS_PER_NODE")
    if per_node is None:
        if tasks == "1":
            per_node = "1"
        else:
            return [
                f"Slurm has started {tasks} tasks without --ntasks-per-node, so nobody knows how many share a node. "
                "HINT: sbatch --ntasks-per-node=DEVICES, as `lipdp submit` writes it."
            ]
    problems = []
    if devices is not None and int(per_node) != devices:
        problems.append(
            f"trainer.devices is {devices}, and Slurm has started {per_node} tasks per node (--ntasks-per-node): each "
            f"device needs one task. HINT: --trainer.devices={per_node}, or --ntasks-per-node={devices} for sbatch."
        )
    given = os.environ.get("SLURM_STEP_NUM_NODES", os.environ.get("SLURM_NNODES", "1"))
    if nodes is not None and int(given) != nodes:
        problems.append(
            f"trainer.num_nodes is {nodes}, and the job step has {given} nodes (--nodes). "
            f"HINT: --trainer.num_nodes={given}, or --nodes={nodes} for sbatch."
        )
    return problems


def _scontrol(*words: str) -> str:
    """Returns the output of scontrol; raises RuntimeError with its error message."""
    try:
        result = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(str(error)) from error
    if result.returncode:
        raise RuntimeError((result.stderr or result.stdout).strip() or f"scontrol returned {result.returncode}")
    return result.stdout


def can_requeue() -> bool:
    """Returns whether scontrol can be called; in a container it usually cannot."""
    return shutil.which("scontrol") is not None


def requeue(job: str) -> None:
    """Puts the job back into the queue; raises RuntimeError if the controller refuses."""
    assert re.fullmatch(r"\d+(_\d+)?", job), job
    _scontrol("requeue", job)


def fate_after_sigterm(job: str) -> Fate:
    """Returns what SIGTERM means for the job: it must requeue itself, it has been requeued, or it was ended.

    A job that is preempted within a grace period is still RUNNING and has a preemption time. It would end for good if
    it exited now, so it has to requeue itself. A job that a user has cancelled must not come back.
    """
    try:
        text = _scontrol("--oneliner", "show", "job", job)
    except RuntimeError:
        return "end"
    state = re.search(r"\bJobState=(\S+)", text)
    preempted = re.search(r"\bPreemptTime=(\S+)", text)
    if state and state[1] in ("RUNNING", "PREEMPTED") and preempted and preempted[1] not in ("None", "(null)"):
        return "requeue"
    return "requeued" if state and state[1] in ("PENDING", "REQUEUED", "REQUEUE_HOLD") else "end"
