"""Implements ``lipdp fit``: trains, tests on held-out data, and reports the result."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..bound_text import upper_text
from ..experiment.held_out import held_out_metrics
from ..files import AGAIN, FileNotWritten, is_of_a_write, not_written
from ..report.majority import Majority
from ..report.show import show
from ..slurm import environment as slurm
from ..slurm.signals import ignore, listen
from .option_parser import OptionParser

if TYPE_CHECKING:
    from ..experiment.experiment import Experiment

_OWN = "lipdp fit --config FILE [--run_dir DIR] [--wandb auto|online|offline|off] [--GROUP.KEY VALUE ...]"
_LAST = "_last_weights"
_LAUNCHED = "LIPDP_RUN_DIR"  # tells the ranks that Lightning launches the run directory of the first

_HELP = f"""usage: {_OWN}

--run_dir DIR   a new or empty directory, or that of an unfinished run to continue
--wandb MODE    auto (default): offline unless WANDB_API_KEY is set

--help-all      the options of Lightning's trainer, too

Options of the experiment: groups privacy, model, data, optimizer, lr_scheduler and trainer.

"""


def split(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Splits the options of the command itself from those of the experiment."""
    parser = OptionParser(prog="lipdp fit", add_help=False, hint=_OWN)
    parser.add_argument("--run_dir", "--run-dir", default=None, help="a new or empty directory, or one to continue")
    parser.add_argument("--wandb", choices=("auto", "online", "offline", "off"), default="auto", help="mode of wandb")
    return parser.parse_known_args(list(arguments))


def default_run_dir(arguments: Sequence[str]) -> Path:
    """Returns a new folder under runs/, named after the configuration and the time, or the job; it is the same on every
    rank.

    A job that is requeued keeps its id and its step's number, and so finds its run again.
    """
    configs = [b for a, b in itertools.pairwise(arguments) if a in ("--config", "-c")]
    name = Path(configs[-1]).stem if configs else "run"
    if slurm.in_step():
        return Path("runs") / f"job{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}-{name}"
    if os.environ.get("LOCAL_RANK", "0") != "0" and _LAUNCHED in os.environ:
        return Path(os.environ[_LAUNCHED])
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ValueError("torchrun starts processes that share no name for a new run. HINT: give --run_dir.")
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]
    directory = Path("runs") / f"{stamp}-{name}"
    os.environ[_LAUNCHED] = str(directory)
    return directory


def main(arguments: Sequence[str]) -> int:
    if slurm.job_id() is not None:
        # a signal during the imports, which take seconds, would end the job if there were no handler
        listen([signal.SIGUSR1, signal.SIGTERM])
    code = _run(arguments)
    if slurm.job_id() is not None:
        ignore(signal.SIGUSR1)
    return code


def _run(arguments: Sequence[str]) -> int:
    own, rest = split(arguments)
    if asked := {"-h", "--help", "--help-all"} & set(rest):
        from .fit_help import fit_help

        sys.stdout.write(_HELP + fit_help("--help-all" in asked))
        return 0
    asked_for = [word.split("=")[0] for word in rest]
    if not any(word in ("--config", "-c", "--print_config") or word.endswith(".help") for word in asked_for):
        raise ValueError("no --config was given. HINT: lipdp fit --config quickstart; `lipdp configs` lists others")
    from ..experiment.experiment import parse_experiment
    from ..experiment.quiet import quiet
    from ..training.run_directory import RunDirectory

    if problems := slurm.task_problems():
        raise ValueError(" ".join(problems))
    directory = RunDirectory(own.run_dir if own.run_dir is not None else default_run_dir(rest))
    if slurm.restarted() and (directory.record() or {}).get("status") == "finished":
        show(f"the run in {directory.path} was finished before this job was requeued\n")
        return 0
    with quiet():
        experiment = parse_experiment(rest, directory, own.wandb)
        code = train(experiment, directory.path)
        _leave_group(experiment.trainer.world_size)
        return code


def train(experiment: Experiment, run_dir: Path) -> int:
    """Trains, evaluates and reports.

    Returns:
        The exit code: 0, also if the run goes on in a requeued job; 130 if the user interrupted it; 1 if another of its
            processes ended.
    """
    from ..callbacks import Preempted, ResumeCheckpoint
    from ..training.launcher import LOST
    from ..training.processes import lost_process

    checkpoint = experiment.claim()
    trainer = experiment.trainer
    if checkpoint is not None and trainer.is_global_zero:
        show(f"continuing the run in {run_dir}\n")
    hint = f"continue with the same command and --run_dir {run_dir}\n"
    try:
        trainer.fit(experiment.model, datamodule=experiment.datamodule, ckpt_path=checkpoint, weights_only=False)
        if experiment.callback(ResumeCheckpoint).interrupted:
            if trainer.is_global_zero:
                show(f"interrupted at step {trainer.global_step}; {hint}", sys.stderr)
            return 130
        metrics = _evaluated(experiment)
        if trainer.is_global_zero:
            _finish(experiment, metrics, run_dir)
        return 0
    except OSError as error:
        raise _of_the_run(error, run_dir) from error
    except Preempted as stopped:
        if trainer.is_global_zero and slurm.job_id() is None:
            show(hint, sys.stderr)
        return int(stopped.code or 0)
    except RuntimeError as error:
        reason = lost_process(error) if trainer.world_size > 1 else None
        if reason is None:
            raise
        show(
            f"lipdp fit: another process of this run ended, so rank {trainer.global_rank} ends too "
            f"({reason}). Everything up to the last checkpoint is kept. "
            f"HINT: look for what ended it; {hint}",
            sys.stderr,
        )
        return LOST
    except SystemExit:
        if trainer.is_global_zero and trainer.interrupted:
            show(f"stopped; {hint}", sys.stderr)
        raise
    finally:
        _close(experiment)
        experiment.release()


def _of_the_run(error: OSError, run_dir: Path) -> OSError:
    """Returns the error of a write with what is safe, and with what to do next if the training is finished."""
    from ..training.run_directory import RunDirectory

    if not isinstance(error, FileNotWritten) and is_of_a_write(error):  # a logger's, which may not name its file
        name = error.filename or f"a file of the run in {run_dir}"
        error = not_written(name, error, "Everything up to the last checkpoint is kept.")
    if isinstance(error, FileNotWritten) and (RunDirectory(run_dir).record() or {}).get("status") == "finished":
        instead = f"then write it by `lipdp report --run_dir {run_dir}`, since the training is finished"
        return FileNotWritten(error.errno, str(error).replace(AGAIN, instead))
    return error


def _leave_group(world_size: int) -> None:
    """Leaves the process group before the interpreter ends, since a remaining thread of it may abort the process."""
    import torch

    if world_size > 1 and torch.distributed.is_initialized():
        with contextlib.suppress(RuntimeError):  # another process may be gone
            torch.distributed.destroy_process_group()


def _evaluated(experiment: Experiment) -> dict[str, float]:
    """Returns the metrics on held-out rows; an error leaves a report without them."""
    from ..callbacks import PrivacyReport

    trainer = experiment.trainer
    try:
        return held_out_metrics(trainer, experiment.model, experiment.datamodule) | _of_last_weights(experiment)
    except Exception:
        experiment.callback(PrivacyReport).write(trainer, experiment.model)
        raise


def _of_last_weights(experiment: Experiment) -> dict[str, float]:
    """Returns the metrics of the last weights themselves, if their average is evaluated and both are wanted."""
    from ..callbacks.parameter_averaging import averaging_of

    averaging = averaging_of(experiment.trainer)
    if averaging is None or not (averaging.raw_metrics and averaging.average.exists):
        return {}
    with averaging.last_weights():
        metrics = held_out_metrics(experiment.trainer, experiment.model, experiment.datamodule)
    return {f"{name}{_LAST}": value for name, value in metrics.items()}


def _finish(experiment: Experiment, metrics: dict[str, float], run_dir: Path) -> None:
    from ..callbacks import PrivacyReport
    from ..callbacks.parameter_averaging import averaging_of

    report, plan, trainer = experiment.callback(PrivacyReport), experiment.plan, experiment.trainer
    report.write(trainer, experiment.model, metrics)
    report.publish(trainer)
    facts = report.facts
    averaging = averaging_of(trainer)
    if averaging is not None and averaging.average.exists:
        show(f"{'weights':<22}averaged: {averaging.average}\n")
    for name, value in metrics.items():
        if name.removesuffix(_LAST).endswith(("/accuracy", "/mae")):
            majority = Majority.of(metrics, name)
            show(f"{name:<21} {value:.4f}" + (f"  ({majority.beside()})\n" if majority else "\n"))
            if majority is not None and not majority.is_beaten:
                show(f"{'caution':<22}{majority.caution()}\n")
    if not metrics:
        show(f"{'metric':<22}none: {type(experiment.datamodule).__name__} has no held-out rows\n")
    if facts.certified:
        relation = f"at delta {upper_text(plan.delta)}, {plan.adjacency}"
        show(f"{'epsilon':<22}{upper_text(facts.epsilon, 5)}  {relation}\n")
        if facts.stopped_early:
            show(
                f"{'':<22}that is the guarantee, of {facts.steps_planned} planned steps; the {facts.steps_taken} steps "
                f"taken account for {upper_text(facts.epsilon_taken, 5)}\n"
            )
    else:
        show("certified: false      no epsilon is guaranteed for this run\n")
    show(f"{'report':<22}{report.paths['report.html']}\n")
    if facts.stopped_early:
        show(f"stopped before its last planned step; continue it with --run_dir {run_dir}\n")


def _close(experiment: Experiment) -> None:
    """Ends the runs of the loggers that have begun one."""
    for logger in experiment.trainer.loggers:
        finish = getattr(getattr(logger, "_experiment", None), "finish", None)
        if callable(finish):
            finish()
