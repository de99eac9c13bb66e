"""Implements ``lipdp submit``: prints or submits a training job for Slurm."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..experiment.config_file import check_config_file
from ..report.show import show
from ..slurm.script import MOST_RUNS, Array, Job, render
from .option_parser import OptionParser

# option -> the variable that sbatch itself reads if the script does not set it
_SITE_OPTIONS = {
    "account": "SBATCH_ACCOUNT",
    "partition": "SBATCH_PARTITION",
    "constraint": "SBATCH_CONSTRAINT",
    "qos": "SBATCH_QOS",
}
_SITE_LISTS = ("options", "setup")
_SITE_KEYS = {*_SITE_OPTIONS, *_SITE_LISTS, "time", "cpus_per_task", "signal_before", "container_command", "command"}
# these would override the lines of the script
_OVERRIDES = (
    *_SITE_OPTIONS.values(), "SBATCH_TIMELIMIT", "SBATCH_SIGNAL", "SBATCH_REQUEUE", "SBATCH_NO_REQUEUE",
    "SBATCH_OPEN_MODE", "SBATCH_OUTPUT", "SBATCH_ARRAY_INX", "SBATCH_JOB_NAME", "SBATCH_GPUS_PER_NODE",
)  # fmt: skip


_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|infinite")


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="lipdp submit",
        description="Write the sbatch script of a training job, and submit it. What follows -- goes to lipdp fit.",
        epilog="Account, partition, constraint, qos and time come from the options, else from SBATCH_ACCOUNT, "
        "SBATCH_PARTITION, SBATCH_CONSTRAINT, SBATCH_QOS and SBATCH_TIMELIMIT, else from the site file.",
    )
    add = parser.add_argument
    add("--config", required=True, help="the experiment's YAML file")
    add(
        "--run_dir",
        "--run-dir",
        help="run directory (default: a new one below runs/); with --array, the folder of the runs",
    )
    add("--nodes", type=int, help="number of nodes (default: the configuration's trainer.num_nodes)")
    add("--ntasks-per-node", type=int, help="processes on each node (default: the configuration's trainer.devices)")
    add(
        "--gpus-per-node",
        type=int,
        help="GPUs of each node (default: one per task if the configuration trains on GPUs)",
    )
    add("--cpus-per-task", type=int, help="processors of each process (default: 4 with GPUs, else 1)")
    add("--time", help="time limit of one job; a longer run is requeued until it is finished")
    add(
        "--array",
        action="append",
        default=[],
        metavar="KEY=V1,V2,...",
        help="start one run per value, such as seeds=1,2,3 or epsilon=1,2,4 or any other key; given several times, "
        "one run per combination",
    )
    add("--container", metavar="IMAGE", help="run inside this image with apptainer")
    for name in _SITE_OPTIONS:
        add(f"--{name}", help=f"the {name} of the job")
    add("--site", metavar="FILE", help="YAML file with the settings of all jobs on a cluster (default: LIPDP_SITE)")
    add(
        "--signal-before",
        type=int,
        metavar="S",
        help="save and requeue this many seconds before the limit (default 120)",
    )
    add("--anyway", action="store_true", help="submit a run that its forecast does not expect to learn")
    add("--no-check", action="store_true", help="do not check the configuration before queueing it")
    add("--dry-run", action="store_true", help="print the script and submit nothing")
    return parser


def main(arguments: Sequence[str]) -> int:
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    own, extra = _parser().parse_args(words[:cut]), tuple(words[cut + 1 :])
    job = job_from(own, extra, os.environ)
    if not own.no_check:
        _check(job, own.anyway)
    shown = words[:cut] if own.run_dir is not None else [*words[:cut], "--run_dir", job.run_dir]
    header = shlex.join(
        ["lipdp", "submit", *(w for w in shown if w not in ("--dry-run", "--no-check", "--anyway")), *words[cut:]]
    )
    script = render(job, header)
    if own.dry_run:
        sys.stdout.write(script)
        return 0
    return _submit(job, script)


def job_from(own: argparse.Namespace, extra: tuple[str, ...], environment: Mapping[str, str]) -> Job:
    """Returns the job that the options, the environment, the site file and the configuration describe together."""
    site = _site(own.site or environment.get("LIPDP_SITE"))
    given = _trainer_options(extra)
    trainer = _trainer(own.config) | given
    nodes, tasks = _layout(own, trainer, given)
    on_gpus = str(trainer.get("accelerator", "auto")) in ("gpu", "cuda") or bool(own.gpus_per_node)
    gpus = own.gpus_per_node if own.gpus_per_node is not None else tasks if on_gpus else 0
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    options = []
    for name, variable in _SITE_OPTIONS.items():
        value = getattr(own, name) or environment.get(variable) or site.get(name)
        if value:
            options.append(f"--{name}={value}")
    job = Job(
        config=own.config,
        run_dir=own.run_dir or f"runs/{stamp}-{Path(own.config).stem}",
        nodes=nodes,
        tasks_per_node=tasks,
        gpus_per_node=gpus,
        cpus_per_task=_first(own.cpus_per_task, site.get("cpus_per_task"), 4 if gpus else 1),
        time=_first(own.time, environment.get("SBATCH_TIMELIMIT"), site.get("time")),
        signal_before=_first(own.signal_before, site.get("signal_before"), 120),
        arrays=tuple(map(Array.parse, own.array)),
        container=own.container,
        container_command=site.get("container_command", Job.container_command),
        options=(*options, *site.get("options", [])),
        setup=tuple(site.get("setup", [])),
        command=site.get("command") or _command(own.container is not None),
        extra=(*extra, *_devices(trainer, nodes, tasks, bool(own.gpus_per_node))),
    )
    return _sane(job).checked()


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _command(in_container: bool) -> str:
    """Returns `lipdp` if the job will find it, and this interpreter's module otherwise."""
    if in_container or shutil.which("lipdp"):
        return "lipdp"
    return f"{shlex.quote(sys.executable)} -m lipdp_lightning.cli"


def _sane(job: Job) -> Job:
    problems = [
        f"--{name} {value} is not positive."
        for name, value in (
            ("nodes", job.nodes), ("ntasks-per-node", job.tasks_per_node),
            ("cpus-per-task", job.cpus_per_task), ("signal-before", job.signal_before),
        )
        if not isinstance(value, int) or value < 1
    ]  # fmt: skip
    if job.time is not None and not _TIME.fullmatch(str(job.time)):
        problems.append(f"--time {job.time} is not a time of Slurm, such as 30, 12:00:00 or 1-12:00.")
    if job.gpus_per_node and job.gpus_per_node != job.tasks_per_node:
        problems.append(
            f"--gpus-per-node {job.gpus_per_node} and --ntasks-per-node {job.tasks_per_node} differ; "
            "each GPU needs one task."
        )
    own = [w for w in job.extra if w.split("=")[0] in ("--config", "-c", "--run_dir", "--run-dir")]
    if own:
        problems.append(f"{own[0]} belongs before the --, to lipdp submit.")
    keys = [array.key for array in job.arrays]
    for key in dict.fromkeys(keys):
        if keys.count(key) > 1:
            problems.append(f"--array names {key} twice; its values belong into one list.")
        if any(w.split("=")[0] == f"--{key}" for w in job.extra):
            problems.append(f"--{key} is given twice, by --array and after the --.")
    runs = math.prod(len(array.values) for array in job.arrays)
    if runs > MOST_RUNS:
        problems.append(f"--array makes {runs} runs, and a job has at most {MOST_RUNS}.")
    if problems:
        raise ValueError(f"{' '.join(problems)} HINT: lipdp submit --help")
    return job


def _yaml(path: str, what: str) -> dict[str, Any]:
    import yaml

    check_config_file(path, what)
    content: dict[str, Any] = yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
    return content


def _site(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    content = {key: value for key, value in _yaml(path, "settings of a site").items() if value is not None}
    unknown = sorted(set(content) - _SITE_KEYS)
    wrong = [f"{key} is unknown" for key in unknown]
    wrong += [f"{key} is not a list of lines" for key in _SITE_LISTS if not _lines(content.get(key, []))]
    if wrong:
        raise ValueError(f"{path}: {', '.join(wrong)}. HINT: the keys are {', '.join(sorted(_SITE_KEYS))}.")
    if "time" in content:
        content["time"] = str(content["time"])
    return content


def _lines(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(line, str) for line in value)


def _trainer(config: str) -> dict[str, Any]:
    """Returns the trainer group of the configuration."""
    group = _yaml(config, "configuration").get("trainer") or {}
    return dict(group) if isinstance(group, dict) else {}


def _trainer_options(extra: Sequence[str]) -> dict[str, Any]:
    """Returns the keys of the trainer group that are given after the --."""
    import yaml

    found: dict[str, Any] = {}
    words = list(extra)
    for i, word in enumerate(words):
        if word.startswith("--trainer."):
            key, sign, value = word.removeprefix("--trainer.").partition("=")
            value = value if sign else words[i + 1] if i + 1 < len(words) else ""
            try:
                found[key] = yaml.safe_load(value)
            except yaml.YAMLError:
                raise ValueError(f"{word} has a value that is not YAML. HINT: --trainer.{key}=1") from None
    return found


def _layout(own: argparse.Namespace, trainer: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the number of nodes and of tasks per node; each device has one task.

    Options of this command override the configuration, and contradict what is given after the --.
    """
    configured = _count(trainer.get("devices", "auto"))
    tasks = _first(own.ntasks_per_node, own.gpus_per_node or None, configured)
    nodes = _first(own.nodes, trainer.get("num_nodes"), 1)
    problems = []
    if tasks is None:
        problems.append(
            f"trainer.devices is {trainer.get('devices', 'auto')!r}, so the number of tasks is not known. "
            "HINT: use --ntasks-per-node."
        )
    asked_for = (("devices", _count(given.get("devices")), tasks), ("num_nodes", given.get("num_nodes"), nodes))
    for key, asked, chosen in asked_for:
        if asked is not None and tasks is not None and asked != chosen:
            problems.append(
                f"--trainer.{key}={asked} after the -- contradicts the job's {chosen}; each device needs one task. "
                "HINT: leave it out; --nodes and --gpus-per-node set it."
            )
    if own.gpus_per_node and str(given.get("accelerator", "gpu")) not in ("auto", "gpu", "cuda"):
        problems.append(
            f"--gpus-per-node {own.gpus_per_node} trains on GPUs, and --trainer.accelerator={given['accelerator']} "
            "after the -- does not. HINT: leave one of them out."
        )
    if problems:
        raise ValueError(" ".join(problems))
    return nodes, tasks


def _count(devices: Any) -> int | None:
    """Returns the number of devices, or None if it is not said."""
    if isinstance(devices, list):
        return len(devices)
    return int(devices) if str(devices).isdigit() else None


def _devices(trainer: Mapping[str, Any], nodes: int, tasks: int, gpus: bool) -> list[str]:
    """Returns the options in which the job differs from the configuration; what agrees with it is not repeated."""
    told = []
    if gpus and str(trainer.get("accelerator", "auto")) not in ("auto", "gpu", "cuda"):
        told.append("--trainer.accelerator=gpu")
    if _count(trainer.get("devices", "auto")) != tasks:
        told.append(f"--trainer.devices={tasks}")
    if trainer.get("num_nodes") != nodes:
        told.append(f"--trainer.num_nodes={nodes}")
    return told


def _check(job: Job, anyway: bool) -> None:
    """Finds errors in the plan, the model and the run directory now, and runs that would not learn.

    Raises:
        ValueError: If a job would fail, or is not expected to learn and was not asked for anyway.
    """
    from ..experiment.experiment import parse_experiment
    from ..training.run_directory import RunDirectory
    from .fit import split

    runs = job.runs()
    others = runs[1:][-1:]  # arrays are checked by their first and their last run
    for directory, arguments in (runs[0], *others):
        _, rest = split(arguments)
        here = ("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.num_nodes=1")
        experiment = parse_experiment([*rest, *here], None, "off")
        RunDirectory(directory).check(experiment.plan.digest().hex(), experiment.plan.to_dict())
        _show_forecast(experiment, anyway)


def _show_forecast(experiment: Any, anyway: bool) -> None:
    from ..forecast import NoForecast, forecast

    try:
        found = forecast(experiment.model, experiment.plan, experiment.datamodule)
    except NoForecast as error:
        show(f"forecast: {error}\n", sys.stderr)
        return
    if not (found.learns or anyway):
        raise ValueError(f"{found.verdict()} Or submit it with --anyway.")
    show(f"forecast: {found.verdict()}\n", sys.stderr)


def _submit(job: Job, script: str) -> int:
    environment = {name: value for name, value in os.environ.items() if name not in _OVERRIDES}
    Path(job.run_dir).parent.mkdir(
        parents=True, exist_ok=True
    )  # the folder of the log, without which the job would fail silently
    try:
        return subprocess.run(["sbatch"], input=script, text=True, env=environment).returncode
    except FileNotFoundError as error:
        raise ValueError("there is no sbatch here. HINT: --dry-run prints the script.") from error
