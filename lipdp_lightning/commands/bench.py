"""``lipdp bench``: the certificate's cost per step beside a forward and backward pass, on this machine."""

from __future__ import annotations

import argparse
import json
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", nargs="+", default=["convnet-1.6m", "wrn-16-4"], help="models to measure")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    from ..bench.certificate import MODELS, as_rows, measure
    from ..report.tables import render_table

    unknown = [name for name in args.model if name not in MODELS]
    if unknown or min([*args.batch_size, args.repeats]) < 1:
        raise ValueError(
            f"--model {' '.join(args.model)} --batch-size {args.batch_size} --repeats {args.repeats} cannot be measured. "
            f"HINT: models are {', '.join(MODELS)}; sizes and repeats are positive."
        )
    costs = [cost for name in args.model for cost in measure(name, args.batch_size, args.repeats)]
    if args.json:
        sys.stdout.write(json.dumps(as_rows(costs), indent=1) + "\n")
        return 0
    headers = (
        "model", "parameters", "batch", "forward+backward s", "exact cert. s", "cheap cert. s", "projection s",
        "exact norms/step", "amortised s", "% of step",
    )  # fmt: skip
    rows = [tuple(row.values()) for row in as_rows(costs)]
    sys.stdout.write(render_table(headers, rows, title="Cost of the certificate per step") + "\n")
    return 0
