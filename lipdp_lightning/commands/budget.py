"""Implements `lipdp budget`: the epsilon that a noise multiplier spends, or the noise that a budget needs, without
data.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import warnings

from ..report.show import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset-size", type=int, required=True, metavar="N", help="number of private examples")
    parser.add_argument(
        "--batch-size", type=float, required=True, metavar="B", help="EXPECTED size of the Poisson sample"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=float, metavar="E", help="steps = ceil(E * N / B)")
    length.add_argument("--steps", type=int, metavar="T", help="number of steps")
    parser.add_argument(
        "--delta", type=float, required=True, metavar="d", help="probability that the guarantee fails; well below 1/N"
    )
    query = parser.add_mutually_exclusive_group()
    query.add_argument("--epsilon", type=float, nargs="+", default=[], metavar="e", help="one or more budgets")
    query.add_argument(
        "--noise-multiplier", type=float, nargs="+", default=[], metavar="s", help="one or more noise levels"
    )
    parser.add_argument(
        "--statistics", type=float, nargs="+", default=[], metavar="s",
        help="noise multipliers of statistics of all rows that are released before the first step",
    )  # fmt: skip
    parser.add_argument("--accountant", default="pld", help="pld (default), prv or rdp")
    parser.add_argument("--adjacency", default="add_remove", help="add_remove (default) or replace_one")
    parser.add_argument("--json", action="store_true", help="machine-readable; a list if several values are given")


def run(args: argparse.Namespace) -> int:
    """Prints the table or the JSON, and returns 0; raises ValueError for a question without an answer."""
    from lipdp_lightning.commands.budget_question import compute_budget, format_table

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        rows = compute_budget(
            dataset_size=args.dataset_size,
            batch_size=args.batch_size,
            delta=args.delta,
            epochs=args.epochs,
            steps=args.steps,
            epsilons=args.epsilon,
            noise_multipliers=args.noise_multiplier,
            accountant=args.accountant,
            adjacency=args.adjacency,
            statistics=args.statistics,
        )
    messages = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    if args.delta >= 1 / args.dataset_size:
        messages.append(
            f"delta {args.delta:g} >= 1/N = {1 / args.dataset_size:.3g} permits publishing one record outright. "
            "HINT: use a delta well below 1/N"
        )
    for message in dict.fromkeys(messages):
        show(f"warning: {message}\n", sys.stderr)
    if args.json:
        content = [dataclasses.asdict(row) for row in rows]
        show(json.dumps(content[0] if len(content) == 1 else content, indent=2, allow_nan=False) + "\n")
    else:
        show(f"{format_table(rows)}\n")
    return 0
