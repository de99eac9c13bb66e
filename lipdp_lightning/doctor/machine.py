"""Examines the machine around a run: packages, processors, processes, disk, Slurm."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ..kernels.numeric_environment import arithmetic_problems, gpu_facts, require_exact_arithmetic
from .finding import Finding

NEEDED = {
    "torch": (2, 9), "lightning": (2, 6), "torchmetrics": (1, 4), "numpy": (1, 26), "numba": (0, 60),
    "cryptography": (47,), "dp-accounting": (0, 5),
}  # fmt: skip
_SPACE = 1 << 30
_WRITTEN = 1 << 24
_SLOW = 5.0  # megabytes a second
_SLURM = ("sbatch", "srun", "squeue", "scancel")
_PATIENCE = 20.0


def versions() -> Finding:
    """Compares the packages with the versions that this library needs."""
    found, wrong = {"Python": platform.python_version()}, []
    for package, least in NEEDED.items():
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{package} is missing")
            continue
        if _numbers(found[package]) < least:
            wrong.append(f"{package} is {found[package]}, below {'.'.join(map(str, least))}")
    text = ", ".join(wrong or [f"{name} {version}" for name, version in found.items()])
    return Finding(text, "install the package again, with its dependencies." if wrong else "", dict(found))


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.partition("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdecimal())


def the_device(device: torch.device) -> Finding:
    """Tells which processor is there."""
    if device.type == "cpu":
        threads, cores = torch.get_num_threads(), os.cpu_count() or 1
        text = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {threads} threads on {cores} cores"
        hint = f"set OMP_NUM_THREADS to {cores} or fewer: threads wait for each other." if threads > cores else ""
        return Finding(text, hint, {"threads": threads, "cores": cores})
    if not torch.cuda.is_available():
        built = "this torch was built without CUDA" if torch.version.cuda is None else "no GPU or no driver was found"
        return Finding(built, "ask the scheduler for a GPU, look at nvidia-smi, or use lipdp doctor --device cpu.")
    facts = gpu_facts(device)
    return Finding(
        f"{facts['device']}, CUDA {facts['CUDA']}, cuDNN {facts['cuDNN']}, {facts['driver']}", "", dict(facts)
    )


def switches() -> Finding:
    """Sets the switches of the arithmetic as a run does, and reads them."""
    require_exact_arithmetic()
    problems = arithmetic_problems()
    if not problems:
        return Finding("products are rounded as the certificate assumes")
    return Finding(
        "; ".join(problem.partition(" HINT: ")[0] for problem in problems), problems[0].partition("HINT: ")[2]
    )


def processes(device: torch.device) -> Finding:
    """Sums a number over a group of one process, as the all-reduce of a run with several does."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    available = dist.is_available() and (dist.is_nccl_available() if backend == "nccl" else dist.is_gloo_available())
    if not available:
        return Finding(f"torch has no {backend}", "runs on several processes need it: install another build of torch.")
    if dist.is_initialized():
        return Finding(f"{backend} is there; this process is in a group already")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        total = torch.ones(1000, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        right = bool((total == 1).all())
    finally:
        dist.destroy_process_group()
    return Finding(f"{backend} sums in float64", "" if right else f"{backend} returns a wrong sum: reinstall torch.")


def disk(folder: Path) -> Finding:
    """Measures space and speed where runs are written; a step's record is flushed before its release."""
    place = next((p for p in (folder, *folder.absolute().parents) if p.exists()), folder)
    if not place.is_dir():
        return Finding(f"{place} is a file", "name another folder with --run-dir.")
    free = shutil.disk_usage(place).free
    with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor") as file:
        begun = time.perf_counter()
        file.write(os.urandom(1 << 20) * (_WRITTEN >> 20))
        file.flush()
        os.fsync(file.fileno())
        speed = _WRITTEN / 1e6 / max(time.perf_counter() - begun, 1e-9)
    numbers = {"free_bytes": free, "megabytes_per_second": round(speed, 1)}
    hint = ""
    if free < _SPACE:
        hint = "free space, or name another folder with --run-dir: a run needs checkpoints and a record."
    elif speed < _SLOW:
        hint = "name a folder on a faster disk with --run-dir: every checkpoint waits for it."
    return Finding(f"{free / 1e9:.1f} GB free at {place}, {speed:.0f} MB/s flushed", hint, numbers)


def slurm() -> Finding:
    """Asks Slurm's commands for their version, where they are installed."""
    present = [name for name in _SLURM if shutil.which(name)]
    if not present:
        return Finding("not installed: runs are started directly, and lipdp submit writes scripts alone")
    missing = [name for name in _SLURM if name not in present]
    failing = [f"{name} fails ({why})" for name in present if (why := _failure(name)) is not None]
    if missing or failing:
        words = [*(f"{name} is missing" for name in missing), *failing[:1]]
        return Finding("; ".join(words), "ask the cluster's administrators; lipdp submit needs sbatch and srun.")
    return Finding(", ".join(present))


def _failure(command: str) -> str | None:
    """Returns why a command does not tell its version, or None if it does."""
    try:
        done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
