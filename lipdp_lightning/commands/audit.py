"""Implements ``lipdp audit``: attacks the claim of a configuration, and writes a page with verdicts, plots
and factors.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..report.show import show
from .option_parser import OptionParser

_USE = "lipdp audit --config FILE [--suite quick|full] [--out DIR] [--json] [--GROUP.KEY VALUE ...]"
MOST_RECORDS = 4000
SHADOW_MODELS = 8


def split(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Splits the options of the command itself from those of the experiment."""
    parser = OptionParser(
        prog="lipdp audit", hint=_USE,
        description="Attack what a configuration claims. Other options override its keys, as in lipdp fit. Exit code 1 "
        "if a check is violated, 2 for bad input.",
    )  # fmt: skip
    parser.add_argument("--config", required=True, help="the experiment's YAML file")
    parser.add_argument(
        "--suite", choices=("quick", "full"), default="quick",
        help="full adds whole runs, the black-box tests and membership inference, which trains on the private rows",
    )  # fmt: skip
    parser.add_argument(
        "--out", default=None, metavar="DIR", help="directory for audit.html and audit.json (default audit/<name>)"
    )
    parser.add_argument(
        "--confidence",
        type=float,
        default=0.999,
        help="probability that a correct program raises no false alarm (default 0.999)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything that the audit draws (default 0)")
    parser.add_argument("--json", action="store_true", help="print the JSON instead of a table")
    own, rest = parser.parse_known_args(list(arguments))
    if not 0 < own.confidence < 1:
        raise ValueError(f"--confidence {own.confidence} is not in (0, 1). HINT: use --confidence 0.999")
    if own.seed < 0:
        raise ValueError(f"--seed {own.seed} is negative. HINT: use --seed 0")
    return own, ["--config", own.config, *rest]


def main(arguments: Sequence[str]) -> int:
    """Returns 0, or 1 if a check is violated."""
    own, rest = split(arguments)
    from ..audit.audit_page import HTML_NAME, audit_json, terminal_text, write_audit
    from ..audit.suite import run_audit
    from ..experiment.experiment import parse_experiment
    from ..experiment.quiet import quiet

    experiment = parse_experiment(rest, None, "off")
    directory = Path(own.out) if own.out is not None else Path("audit") / Path(own.config).stem
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"--out {directory} is a file. HINT: name a directory.")
    _refuse_unfit(experiment.model, experiment.datamodule)
    extra = {"membership": membership_question(experiment, rest, own.seed)} if own.suite == "full" else {}

    def progress(name: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{name:<40}")

    with quiet():
        report = run_audit(
            experiment.model, experiment.plan, experiment.datamodule, effort=own.suite, confidence=own.confidence,
            seed=own.seed, title=Path(own.config).name, extra=extra, progress=progress,
        )  # fmt: skip
    paths = write_audit(directory, report)
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{'':<40}\r")
    show(audit_json(report) if own.json else f"{terminal_text(report)}\nreport: {paths[HTML_NAME]}\n")
    return 1 if report.violations else 0


def _refuse_unfit(module: Any, data: Any) -> None:
    from ..bounds.certifier import Certifier
    from ..training.model_checks import refuse_outputs

    certifier = Certifier(module.network, data.input_shape, module.input_bound, module.loss)
    refuse_outputs(module.loss, certifier.output_shape, data)


def membership_question(experiment: Any, rest: Sequence[str], seed: int) -> Callable[[float], Any]:
    """Trains target and shadow models, each on the rows that fair coins choose, under the experiment's own plan."""
    import numpy as np
    import torch
    from torch import Tensor, nn

    from ..audit.membership import membership_attacks, membership_finding
    from ..budget.calibrate import privacy_bound
    from ..data_modules.poisson import InMemoryRows
    from ..experiment.experiment import parse_experiment

    def ask(alpha: float) -> Any:
        data, plan = experiment.datamodule, experiment.plan
        data.setup()
        rows = data._train
        chosen = torch.from_numpy(np.random.default_rng(seed).permutation(len(rows))[:MOST_RECORDS])
        x, y, _ = rows[chosen.sort().values]

        def train(mask: Tensor) -> nn.Module:
            # every model starts from weights of its own, since LiRA's spread is that of training as a whole
            own = parse_experiment([*rest, "--trainer.enable_progress_bar", "false"], None, "off")
            own.datamodule.setup()
            own.datamodule._train = InMemoryRows(x[mask], y[mask])
            own.trainer.fit(own.model, datamodule=own.datamodule)
            module: nn.Module = own.model
            return module

        attacks = membership_attacks(
            train,
            experiment.model.private_loss(None),
            data.transform_batch(x),
            y,
            shadow_models=SHADOW_MODELS,
            seed=seed,
        )

        def claimed_at(delta: float) -> float:
            return privacy_bound(plan.step_noise_multiplier, delta, plan.sample_rate, plan.steps, "pld").epsilon

        return membership_finding(attacks, claimed_at, alpha)

    return ask
