"""Implements ``lipdp certify``: prints the certificate of a configuration's model, and attacks it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from ..audit.certificate_table import certificate_content, certificate_table
from ..audit.ratios import AttackReport
from ..experiment.experiment import parse_experiment
from ..forecast import Forecast, forecast, read_public_rows
from ..forecast.forecasts import signal_columns
from ..report.show import show
from ..report.tables import certificate_table as group_table
from ..report.tables import norm_caution
from .option_parser import OptionParser

MOST_STARTS = 100_000


def _split(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = OptionParser(
        prog="lipdp certify",
        description="Print the certificate of a configuration's model after projection. Other options override "
        "keys of the configuration, as in lipdp fit.",
    )
    parser.add_argument("--config", required=True, help="the experiment's YAML file")
    parser.add_argument("--attack", type=int, default=0, metavar="N", help="maximise the ratios from N starting points")
    parser.add_argument("--attack-steps", type=int, default=40, help="gradient ascent steps of the attack (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the attack (default 0)")
    parser.add_argument(
        "--forecast", action="store_true", help="say whether the run is expected to learn, from made-up rows"
    )
    parser.add_argument(
        "--public-inputs", metavar="FILE.npz", help="make the forecast from the public rows x and y of this file"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    own, rest = parser.parse_known_args(list(arguments))
    if own.attack < 0 or own.attack_steps < 0:
        raise ValueError("--attack and --attack-steps must not be negative. HINT: use --attack 24")
    if max(own.attack, own.attack_steps) > MOST_STARTS:
        raise ValueError(f"--attack and --attack-steps must not be above {MOST_STARTS}. HINT: use --attack 24")
    if not 0 <= own.seed < 2**63:
        raise ValueError(f"--seed {own.seed} is not in [0, 2^63). HINT: use --seed 0")
    if own.public_inputs is not None and not own.forecast:
        raise ValueError("--public-inputs belongs to --forecast. HINT: --forecast --public-inputs FILE.npz")
    return own, ["--config", own.config, *rest]


MARGIN = (
    "rounding: delta holds a margin. Its part for adding up in float32 rests on measurements, not on a proof; "
    "docs/guarantee.md, Sums over the batch"
)


def main(arguments: Sequence[str]) -> int:
    """Returns 0, or 1 if the attack found a ratio above 1."""
    own, rest = _split(arguments)
    experiment = parse_experiment(rest, None, "off")
    # the forecast is first, since a certificate projects the weights
    found = _forecast(experiment, own.public_inputs) if own.forecast else None
    rows, certificate, loss = _certificate(experiment)
    rows = [row | signal_columns(found, row["name"]) for row in rows]
    report = _attack(experiment, loss, own) if own.attack else None
    if own.json:
        content = {"groups": rows, **certificate_content(certificate, report)}
        if found is not None:
            content["forecast"] = found.as_dict()
        sys.stdout.write(json.dumps(content, indent=1, allow_nan=False) + "\n")
    else:
        groups = group_table(rows, title="Parameter groups: noise of the first step")
        lines = [f"scaling: {experiment.plan.scaling}, {why}"] if (why := experiment.scaling_reason) else []
        lines += [f"forecast: {found.verdict()}"] if found is not None else []
        lines += [caution] if (caution := norm_caution(rows)) else []
        lines.append(MARGIN)
        facts = "".join(f"{line}\n\n" for line in lines)
        show(f"{groups}\n\n{facts}{certificate_table(certificate, report)}\n")
    return 1 if report is not None and report.violations() else 0


def _forecast(experiment: Any, public_inputs: str | None) -> Forecast:
    module, plan, data = experiment.model, experiment.plan, experiment.datamodule
    inputs = None
    if public_inputs is not None:
        inputs = read_public_rows(public_inputs, tuple(data.input_shape), module.task, data.num_outputs)
    return forecast(module, plan, data, inputs)


def _certificate(experiment: Any) -> tuple[list[dict[str, Any]], Any, Any]:
    """Returns what training would start from: projected weights, their bounds, and the noise."""
    from ..bounds.certifier import Certifier
    from ..mechanism.step import Mechanism
    from ..norms.follow import Follower
    from ..privacy.keys import new_secret
    from ..training.model_checks import refuse_outputs
    from ..training.public_numbers import group_rows
    from ..training.set_up import matching_modules

    module, plan, data = experiment.model, experiment.plan, experiment.datamodule
    if plan.clips_examples or plan.scaling == "none":
        raise ValueError(
            f"scaling {plan.scaling!r} uses no bound of the network, so there is no certificate to print. "
            "HINT: use --privacy.method lipschitz."
        )
    plain = module.loss
    module.clip_loss(plan.loss_clip)
    certifier = Certifier(
        module.network, data.input_shape, module.input_bound, module.loss,
        norms=Follower(), cotangent_caps=matching_modules(module.network, plan.cotangent_clip),
    )  # fmt: skip
    refuse_outputs(plain, certifier.output_shape, data)
    mechanism = Mechanism(module.network, certifier, plan, new_secret())
    try:
        mechanism.project_()
        mechanism.refresh_certificate()
        return group_rows(mechanism), mechanism.certificate, module.loss
    finally:
        mechanism.close()


def _attack(experiment: Any, loss: Any, own: argparse.Namespace) -> AttackReport:
    from ..audit.attack import attack

    module, data = experiment.model, experiment.datamodule
    return attack(
        module.network, tuple(data.input_shape), module.input_bound, loss,
        restarts=own.attack, steps=own.attack_steps, seed=own.seed, weights=True,
    )  # fmt: skip
