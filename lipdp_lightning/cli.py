"""Implements ``lipdp``; every subcommand is a module of ``lipdp_lightning.commands``, imported when called."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

COMMANDS = {
    "init": "write a schema and a configuration for a table, to be filled in by its owner",
    "fit": "train a private model from a configuration",
    "test": "evaluate the model of a run directory on held-out data",
    "predict": "write the outputs of a run or a released model for held-out rows",
    "certify": "print the certificate of a configuration's model, and attack it",
    "audit": "attack what a configuration claims, and measure how much of its epsilon is real",
    "debug": "test a training function of your own for three common mistakes of DP-SGD",
    "budget": "print the epsilon that a noise multiplier spends, or the noise that an epsilon needs",
    "bench": "measure the cost of a private step beside other methods on this machine",
    "curves": "release a distribution function, an ROC curve or a calibration test with noise",
    "tune": "search settings for accuracy against epsilon, and report what the search cost",
    "reproduce": "reproduce the papers' tables and figures, with certified epsilons",
    "submit": "write the batch script of a training job for Slurm, and submit it",
    "export": "write a release checkpoint of a run, without anything secret",
    "compare": "compare several runs: accuracy against epsilon, settings that differ, costs",
    "status": "list the runs of a folder with state, step, epsilon and accuracy",
    "report": "write the reports of a run directory again",
    "configs": "list the configurations that come with the library, and copy them",
    "doctor": "examine a machine, and its GPU, before the first run",
}

_USAGE = "usage: lipdp COMMAND [options]\n\nTrain neural networks with differential privacy.\n\ncommands:\n"


def usage() -> str:
    lines = "\n".join(f"  {name:<10}{text}" for name, text in COMMANDS.items())
    return f"{_USAGE}{lines}\n\n`lipdp COMMAND --help` lists a command's options.\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    An error is shown as one line for each problem. With LIPDP_TRACEBACK=1 its traceback is shown instead.

    Args:
        arguments: the words after ``lipdp``; those of the process by default.

    Returns:
        The exit code: 0 on success, 1 if a check found a violation, 2 for bad input.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        return 0 if words else 2
    name, *rest = words
    if name == "--version":
        from . import __version__

        sys.stdout.write(f"lipdp {__version__}\n")
        return 0
    if name not in COMMANDS:
        sys.stderr.write(f"lipdp: unknown command {name!r}. HINT: use one of {', '.join(COMMANDS)}.\n")
        return 2
    try:
        from .commands.configs import with_packaged
        from .own_folders import importable_folder

        with importable_folder():
            return _run(importlib.import_module(f"lipdp_lightning.commands.{name}"), name, with_packaged(rest))
    except BrokenPipeError:
        return 0
    except Exception as error:
        if os.environ.get("LIPDP_TRACEBACK") == "1":
            raise
        from .experiment.one_line import shown
        from .report.show import show

        show(f"lipdp {name}: {shown(name, error)}\n", sys.stderr)
        return 2


def _run(command: ModuleType, name: str, rest: list[str]) -> int:
    if hasattr(command, "main"):
        return int(command.main(rest))
    from .commands.option_parser import OptionParser

    text = COMMANDS[name]
    parser = OptionParser(prog=f"lipdp {name}", description=f"{text[0].upper()}{text[1:]}.")
    command.add_arguments(parser)
    return int(command.run(parser.parse_args(rest)))


if __name__ == "__main__":
    raise SystemExit(main())
