"""Implements ``lipdp test``: prints the held-out metrics of the model in a run directory, and its calibration."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .option_parser import OptionParser

if TYPE_CHECKING:
    from ..experiment.experiment import Experiment
    from ..training.run_directory import RunDirectory


def _split(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = OptionParser(
        prog="lipdp test",
        description="Evaluate a run's last checkpoint on held-out data: validation rows, and test rows where those are "
        "others. A run that averages its weights is evaluated at the average, and one with a temperature at it. Other "
        "options override keys of the run's configuration, such as --data.init_args.root.",
    )
    parser.add_argument("--run_dir", "--run-dir", required=True, help="directory of a run")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument(
        "--trust_config",
        "--trust-config",
        action="store_true",
        help="create what config.yaml names even if the directory was copied here and it names foreign code",
    )
    parser.add_argument(
        "--output", default=None, help="directory for the diagrams and tables of the run's CalibrationMetrics"
    )
    return parser.parse_known_args(list(arguments))


def main(arguments: Sequence[str]) -> int:
    """Returns 0; the run directory is not changed."""
    own, rest = _split(arguments)
    from ..experiment.quiet import quiet
    from ..report.majority import Majority
    from ..report.show import show
    from ..report.words import SOURCES

    directory, experiment = stored_experiment(own.run_dir, own.trust_config, rest)
    with quiet():
        step, metrics, weights = _evaluate(experiment, directory, own.output)
    status = directory.require()["status"]
    content = {
        "run_dir": str(directory.path), "status": status, "step": step, "weights": weights,
        "metrics": metrics, "temperature": experiment.model.output_temperature,
    }  # fmt: skip
    if own.json:
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
    else:
        width = max(22, *(len(name) + 2 for name in metrics))
        show("".join(f"{name:<{width}}{value:.4f}\n" for name, value in metrics.items()))
        show(f"{'step':<22}{step}  ({status})\n{'weights':<22}{weights}\n")
        if experiment.model.output_temperature != 1.0:
            show(f"{'temperature':<22}{experiment.model.output_temperature:.4f}\n")
        show(f"{'computed on':<22}{SOURCES['validation']}\n")
        for name in metrics:
            majority = Majority.of(metrics, name)
            if majority is not None and not majority.is_beaten:
                show(f"{'caution':<22}{majority.caution()}\n")
    return 0


def stored_experiment(run_dir: str, trust_config: bool, rest: Sequence[str]) -> tuple[RunDirectory, Experiment]:
    """Returns a run's directory and the experiment of its configuration, unless that names code which is not trusted.

    Args:
        run_dir: the directory.
        trust_config: whether to trust a configuration that was not written here.
        rest: options that override keys of the configuration.
    """
    from ..experiment.experiment import parse_experiment
    from ..experiment.foreign_code import known_code_only, refuse_projects
    from ..training.run_directory import RunDirectory

    directory = RunDirectory(run_dir)
    directory.require()
    if not directory.checkpoint.exists():
        raise ValueError(f"the run in {run_dir} has no checkpoint yet. HINT: lipdp fit with the same --run_dir.")
    config = directory.configuration()
    refuse_projects(config, directory.path)
    with known_code_only(config, directory.config, trusted=trust_config or directory.made_here()):
        return directory, parse_experiment(["--config", config, *rest], None, "off")


def prepared(experiment: Experiment, directory: RunDirectory) -> tuple[int, str]:
    """Gives an experiment the weights, statistics and temperature of a run; returns its step and kind of weights."""
    from ..training.averaging import evaluated_state
    from ..training.checkpoint_files import read_checkpoint
    from ..training.checkpoints import check_fits, restore_statistics
    from ..training.predictions import read_temperature

    module = experiment.model
    checkpoint = read_checkpoint(directory.checkpoint)
    check_fits(checkpoint, module)
    state, weights = evaluated_state(checkpoint)
    module.load_state_dict(state)
    restore_statistics(checkpoint, experiment.datamodule)
    module.output_temperature = float((read_temperature(directory.path) or {}).get("temperature", 1.0))
    return int(checkpoint["global_step"]), weights


def _evaluate(experiment: Any, directory: Any, output: str | None) -> tuple[int, dict[str, float], str]:
    import lightning

    from ..callbacks import CalibrationMetrics
    from ..experiment.held_out import held_out_metrics

    module, data = experiment.model, experiment.datamodule
    step, weights = prepared(experiment, directory)
    watching = [c for c in experiment.trainer.callbacks if isinstance(c, CalibrationMetrics)]
    if output is not None and not watching:
        raise ValueError(
            "--output is for the diagrams of CalibrationMetrics, which the run does not have. HINT: leave it out."
        )
    for callback in watching:
        callback.directory = output or ""
    chosen = dict(experiment.config_init["trainer"])
    trainer = lightning.Trainer(
        accelerator=chosen.get("accelerator") or "auto", devices=1, precision=chosen.get("precision"),
        callbacks=[*watching], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    metrics = held_out_metrics(trainer, module, data)
    if not metrics:
        raise ValueError(
            f"{type(data).__name__} has no held-out rows. "
            "HINT: --data.init_args.validation_fraction 0.1 holds some out, in training too."
        )
    return step, metrics, weights
