"""Writes the sbatch script of a training job."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from .environment import EXIT_REQUEUE

ARRAY_KEYS = {
    "seed": "seed_everything",
    "seeds": "seed_everything",
    "epsilon": "privacy.epsilon",
    "epsilons": "privacy.epsilon",
}
MOST_RUNS = 1000  # largest array that Slurm accepts by default (MaxArraySize)
_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Array:
    """One run per value of a configuration key; several arrays of a job stand for every combination of their values."""

    key: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Array:
        name, _, listed = text.partition("=")
        values = tuple(value.strip() for value in listed.split(",")) if listed else ()
        problems = [value for value in values if not re.fullmatch(r"[A-Za-z0-9._+-]+", value)]
        if not re.fullmatch(r"[A-Za-z_][\w.]*", name) or not values or problems or len(set(values)) < len(values):
            raise ValueError(
                f"--array {text!r} does not name a key and its values, each once. HINT: --array seeds=1,2,3, "
                "--array epsilon=1,2,4, or another key of the configuration: --array optimizer.init_args.lr=0.1,0.3."
            )
        return cls(ARRAY_KEYS.get(name, name), values)

    @property
    def label(self) -> str:
        return self.key.rsplit(".", 1)[-1].removesuffix("_everything")

    @staticmethod
    def variable(number: int) -> str:
        """Returns the script's variable that holds the value of a task; ``number`` counts the arrays of a job."""
        return "value" if number == 0 else f"value{number + 1}"


@dataclass(frozen=True)
class Job:
    """The requirements of a job, which ``render`` writes as a script.

    ``options`` are further lines for sbatch without ``#SBATCH``; ``setup`` are shell lines before srun. ``container``
    is an image, run by ``container_command``; ``extra`` is passed to `lipdp fit`.
    """

    config: str
    run_dir: str
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    time: str | None = None
    signal_before: int = 120
    arrays: tuple[Array, ...] = ()
    container: str | None = None
    container_command: str = "apptainer exec --nv"
    options: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    command: str = "lipdp"
    extra: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return _NAME.sub("-", PurePath(self.run_dir).name) or "lipdp"

    @property
    def log(self) -> str:
        """The log file beside the run directory, which does not exist yet; % is sbatch's own."""
        folder = str(PurePath(self.run_dir).parent).replace("%", "%%")
        return f"{folder}/{self.name}-{'%A_%a' if self.arrays else '%j'}.out"

    def checked(self) -> Job:
        """Returns the job; raises ValueError for texts that cannot be written into a script."""
        texts = [self.config, self.run_dir, self.container or "", *self.options, *self.extra]
        broken = [text for text in texts if not text.isprintable()]
        if broken:
            raise ValueError(f"{broken[0]!r} holds a line break or a control character. HINT: use another name.")
        if PurePath(self.run_dir).name == "":
            raise ValueError(f"--run_dir {self.run_dir!r} names no directory of its own. HINT: use --run_dir runs/mine")
        return self

    def runs(self) -> list[tuple[str, tuple[str, ...]]]:
        """Returns each run's directory, and the arguments of `lipdp fit` for it."""
        job = self.checked()
        if not self.arrays:
            return [(self.run_dir, job._arguments())]
        found = []
        for values in self.combinations():
            directory = job.directory(values)
            options = (f"--{array.key}={value}" for array, value in zip(self.arrays, values, strict=True))
            found.append((directory, (*replace(job, run_dir=directory)._arguments(), *options)))
        return found

    def combinations(self) -> list[tuple[str, ...]]:
        """Returns the values of each run of the arrays, one for each key."""
        return list(itertools.product(*(array.values for array in self.arrays)))

    def directory(self, values: Sequence[str]) -> str:
        """Returns the directory of the run with these values, one for each array."""
        names = (f"{array.label}-{value}" for array, value in zip(self.arrays, values, strict=True))
        return str(PurePath(self.run_dir) / "-".join(names))

    def _arguments(self) -> tuple[str, ...]:
        return ("--config", self.config, "--run_dir", self.run_dir, *self.extra)


def render(job: Job, header: str = "") -> str:
    """Returns the script; ``header`` becomes its first comment."""
    job = job.checked()
    lines = ["#!/bin/bash", *(f"# {line}" for line in header.splitlines())]
    lines += [f"#SBATCH {shlex.quote(option)}" for option in _sbatch(job)]
    lines += ["", *job.setup] if job.setup else [""]
    id_ = '"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"' if job.arrays else '"$SLURM_JOB_ID"'
    for number, column in enumerate(zip(*job.combinations(), strict=True)):
        name = f"value{'s' if number == 0 else f's{number + 1}'}"
        lines += [f"{name}=({' '.join(column)})", f"{Array.variable(number)}=${{{name}[SLURM_ARRAY_TASK_ID]}}"]
    lines += [""] if job.arrays else []
    lines += [" \\\n    ".join(_srun(job)), "status=$?", ""]
    lines += [
        f"# {EXIT_REQUEUE}: the run is saved, and its process cannot call scontrol",
        f'if [ "$status" -eq {EXIT_REQUEUE} ]; then',
        f"    scontrol requeue {id_}",
        "fi",
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"


def _sbatch(job: Job) -> list[str]:
    options = [
        f"--job-name={job.name}",
        f"--output={job.log}",
        "--open-mode=append",
        "--requeue",
        f"--signal=SIGUSR1@{job.signal_before}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.tasks_per_node}",
        f"--cpus-per-task={job.cpus_per_task}",
    ]
    if job.gpus_per_node:
        options.append(f"--gpus-per-node={job.gpus_per_node}")
    if job.time:
        options.append(f"--time={job.time}")
    if job.arrays:
        options.append(f"--array=0-{len(job.combinations()) - 1}")
    return [*options, *job.options]


def _srun(job: Job) -> list[str]:
    """Returns the command and its arguments, one line each; newer sruns do not take --cpus-per-task from the job."""
    lines = [f"srun --cpus-per-task={job.cpus_per_task} --kill-on-bad-exit=1"]
    if job.container is not None:
        binds = '--bind "$PWD" ${LIPDP_DATA:+--bind "$LIPDP_DATA"}'
        if PurePath(job.run_dir).is_absolute():
            binds += f" --bind {shlex.quote(str(PurePath(job.run_dir).parent))}"
        lines += [f"{job.container_command} {binds}", shlex.quote(job.container)]
    lines.append(f"{job.command} fit")
    config, run_dir = shlex.quote(job.config), shlex.quote(job.run_dir)
    if job.arrays:
        run_dir, start = "", f"{PurePath(job.run_dir)}/"
        for number, array in enumerate(job.arrays):
            run_dir += shlex.quote(f"{start}{array.label}-") + f'"${Array.variable(number)}"'
            start = "-"
    lines += [f"--config {config}", f"--run_dir {run_dir}"]
    for word in job._arguments()[4:]:
        if word.startswith("--"):
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    lines += [f'"--{array.key}=${Array.variable(number)}"' for number, array in enumerate(job.arrays)]
    return lines
