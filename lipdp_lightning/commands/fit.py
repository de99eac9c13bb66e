"""``lipdp fit``: train, then test on held-out data, then say what came out of it."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

_OWN = "lipdp fit --config FILE [--run_dir DIR] [--wandb auto|online|offline|off] [--GROUP.KEY VALUE ...]"


def _split(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of the command itself, and those of the experiment."""
    parser = argparse.ArgumentParser(prog="lipdp fit", add_help=False, usage=_OWN)
    parser.add_argument("--run_dir", default=None)
    parser.add_argument("--wandb", choices=("auto", "online", "offline", "off"), default="auto")
    own, rest = parser.parse_known_args(list(arguments))
    return own, rest


def default_run_dir(arguments: Sequence[str]) -> Path:
    """A new folder under runs/, named after the time and the configuration."""
    configs = [b for a, b in zip(arguments, arguments[1:], strict=False) if a == "--config"]
    name = Path(configs[-1]).stem if configs else "run"
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]
    return Path("runs") / f"{stamp}-{name}"


def main(arguments: Sequence[str]) -> int:
    own, rest = _split(arguments)
    if "-h" in rest or "--help" in rest:
        sys.stdout.write(f"usage: {_OWN}\n\nGroups: model, data, privacy, optimizer, lr_scheduler, trainer.\n\n")
    from ..training.run_directory import RunDirectory
    from .experiment import parse_experiment

    if "-h" not in rest and "--help" not in rest and "--print_config" not in rest and not any(
        a.split("=")[0] == "--config" for a in rest
    ):
        raise ValueError("no --config was given. HINT: lipdp fit --config configs/quickstart.yaml")
    directory = RunDirectory(own.run_dir if own.run_dir is not None else default_run_dir(rest))
    experiment = parse_experiment(rest, directory, own.wandb)
    resume = directory.check(experiment.plan.digest().hex())
    checkpoint = str(directory.checkpoint) if resume and directory.checkpoint.exists() else None
    trainer = experiment.trainer
    trainer.fit(experiment.model, datamodule=experiment.datamodule, ckpt_path=checkpoint, weights_only=False)
    if trainer.interrupted:
        sys.stderr.write(f"interrupted; continue with the same command and --run_dir {directory.path}\n")
        return 130
    metrics = _test(experiment)
    if trainer.is_global_zero:
        _finish(experiment, metrics)
    return 0


def _test(experiment: object) -> dict[str, float]:
    """Metrics on held-out rows, and the report with them in it."""
    from callbacks import PrivacyReport

    trainer, module, data = experiment.trainer, experiment.model, experiment.datamodule  # type: ignore[attr-defined]
    report = next(c for c in trainer.callbacks if isinstance(c, PrivacyReport))
    history = dict(report.facts.metrics) if report.facts is not None else {}
    data.setup("test")
    try:
        data.test_dataloader()
    except ValueError:
        return history
    results = trainer.test(module, datamodule=data, verbose=False)
    metrics = history | {k: float(v) for k, v in results[0].items() if k.startswith("test/")}
    report.write(trainer, module, metrics)
    return metrics


def _finish(experiment: object, metrics: dict[str, float]) -> None:
    from callbacks import PrivacyReport

    trainer, plan = experiment.trainer, experiment.plan  # type: ignore[attr-defined]
    report = next(c for c in trainer.callbacks if isinstance(c, PrivacyReport))
    facts = report.facts
    assert facts is not None
    summary: dict[str, object] = {
        "delta": plan.delta, "noise_multiplier": plan.noise_multiplier, "steps": facts.steps_taken, **metrics
    }  # fmt: skip
    if facts.epsilon is not None:
        summary["epsilon"] = facts.epsilon
    for logger in trainer.loggers:
        experiment_of = getattr(logger, "experiment", None)
        if type(logger).__name__ == "WandbLogger" and experiment_of is not None:
            experiment_of.summary.update(summary)
            experiment_of.finish()
    for name, value in metrics.items():
        if name.endswith(("accuracy", "mae")):
            sys.stdout.write(f"{name:<22}{value:.4f}\n")
    if facts.epsilon is not None:
        sys.stdout.write(f"{'epsilon':<22}{facts.epsilon:.4f}  at delta {plan.delta:g}, {plan.adjacency}\n")
    else:
        sys.stdout.write("certified: false     no epsilon is guaranteed for this run\n")
    sys.stdout.write(f"{'report':<22}{report.paths['report.html']}\n")
