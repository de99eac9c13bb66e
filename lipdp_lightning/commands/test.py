"""``lipdp test``: the held-out metrics of the model in a run directory."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any


def _split(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="lipdp test",
        description="Evaluate a run's last checkpoint on held-out data: validation rows, and test rows where those are "
        "others. A run that averages its weights is evaluated at the average. Other options override keys of the run's "
        "configuration, such as --data.init_args.root.",
        allow_abbrev=False,
    )
    parser.add_argument("--run_dir", "--run-dir", required=True, help="directory of a run")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    return parser.parse_known_args(list(arguments))


def main(arguments: Sequence[str]) -> int:
    """0; the run directory is left as it is."""
    own, rest = _split(arguments)
    from ..training.run_directory import RunDirectory
    from .experiment import parse_experiment
    from .quiet import quiet

    directory = RunDirectory(own.run_dir)
    record = directory.record()
    if record is None or not directory.config.exists():
        raise ValueError(f"{own.run_dir} is not a run directory. HINT: --run_dir names what lipdp fit has written.")
    if not directory.checkpoint.exists():
        raise ValueError(f"the run in {own.run_dir} has no checkpoint yet. HINT: lipdp fit with the same --run_dir.")
    with quiet():
        experiment = parse_experiment(["--config", str(directory.config), *rest], None, "off")
        step, metrics, weights = _evaluate(experiment, directory)
    content = {
        "run_dir": str(directory.path), "status": record["status"], "step": step, "weights": weights,
        "metrics": metrics,
    }  # fmt: skip
    if own.json:
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
    else:
        sys.stdout.write("".join(f"{name:<22}{value:.4f}\n" for name, value in metrics.items()))
        sys.stdout.write(f"{'step':<22}{step}  ({record['status']})\n{'weights':<22}{weights}\n")
    return 0


def _evaluate(experiment: Any, directory: Any) -> tuple[int, dict[str, float], str]:
    import lightning

    from ..training.averaging import evaluated_state
    from ..training.checkpoint_io import read_checkpoint
    from ..training.release import restore_statistics
    from ..training.resume import check_fits
    from .fit import held_out_metrics

    module, data = experiment.model, experiment.datamodule
    checkpoint = read_checkpoint(directory.checkpoint, weights_only=True)
    check_fits(checkpoint, module)
    state, weights = evaluated_state(checkpoint)
    module.load_state_dict(state)
    restore_statistics(checkpoint, data)
    chosen = dict(experiment.config_init["trainer"])
    trainer = lightning.Trainer(
        accelerator=chosen.get("accelerator") or "auto", devices=1, precision=chosen.get("precision"),
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    metrics = held_out_metrics(trainer, module, data)
    if not metrics:
        raise ValueError(
            f"{type(data).__name__} has no held-out rows. "
            "HINT: --data.init_args.validation_fraction 0.1 holds some out, in training too."
        )
    return int(checkpoint["global_step"]), metrics, weights
