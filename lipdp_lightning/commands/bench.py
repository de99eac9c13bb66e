"""``lipdp bench``: the certificate's cost per step beside a forward and backward pass, on this machine."""

from __future__ import annotations

import argparse
import json
import math
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", nargs="+", default=["convnet-1.6m", "wrn-16-4"], help="models to measure")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[256, 1024])
    parser.add_argument(
        "--update-size", type=float, default=0.002, help="of a training step, relative to each weight (Frobenius)"
    )
    parser.add_argument("--steps", type=int, default=200, help="updates, each with projection and certificate")
    parser.add_argument("--repeats", type=int, default=3, help="passes per batch size; long ones are measured once")
    parser.add_argument("--threads", type=int, default=1, help="of torch; processor time if 1, else wall time")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument(
        "--scaling", nargs="?", const="convnet-1.6m", metavar="MODEL",
        help="instead: weak scaling of private steps, --processes against one, with the first --batch-size for each",
    )  # fmt: skip
    parser.add_argument("--processes", type=int, default=2, help="of --scaling, one thread each")


def _problems(args: argparse.Namespace, known: list[str]) -> list[str]:
    problems = [f"--model {name} is not one of {', '.join(known)}" for name in args.model if name not in known]
    counts = {"--batch-size": min(args.batch_size), "--repeats": args.repeats, "--threads": args.threads}
    problems += [f"{option} {count} is not positive" for option, count in counts.items() if count < 1]
    if args.steps < args.repeats:
        problems.append(f"--steps {args.steps} is below --repeats {args.repeats}: passes are taken between steps")
    if not (math.isfinite(args.update_size) and args.update_size > 0):
        problems.append(f"--update-size {args.update_size} is not a positive, finite number")
    return problems


def _scaling(args: argparse.Namespace) -> int:
    from ..bench.certificate import MODELS
    from ..bench.scaling import STEPS_PER_TURN, as_row, measure_scaling
    from ..report.tables import render_table

    problems = [] if args.scaling in MODELS else [f"--scaling {args.scaling} is not one of {', '.join(MODELS)}"]
    if args.processes < 2:
        problems.append(f"--processes {args.processes} is below 2")
    if min(args.repeats, args.batch_size[0]) < 1:
        problems.append(f"--repeats {args.repeats} or --batch-size {args.batch_size[0]} is not positive")
    if problems:
        raise ValueError("; ".join(problems) + ".\nHINT: `lipdp bench --scaling` takes about a minute.")
    row = as_row(measure_scaling(args.scaling, args.batch_size[0], args.processes, args.repeats))
    if args.json:
        sys.stdout.write(json.dumps(row, indent=1) + "\n")
        return 0
    headers = ("model", "batch per process", "processes", "step on one s", "step on all s", "efficiency")
    cells = tuple(row[k] for k in ("model", "batch_size", "processes", "one", "many", "efficiency"))
    sys.stdout.write(render_table(headers, [cells], title="Weak scaling of private steps") + "\n")
    sys.stdout.write(
        f"wall time, medians of {row['steps']} steps in {row['turns']} alternating turns of {STEPS_PER_TURN}, one "
        f"thread per process; processors: {row['processors']}, load average before: {row['load']:.1f}\n"
    )
    if row["processes"] + row["load"] > row["processors"] + 0.5:
        sys.stdout.write("the processes had to share processors: this says nothing about their efficiency\n")
    return 0


def run(args: argparse.Namespace) -> int:
    if args.scaling is not None:
        return _scaling(args)
    import torch

    from ..bench.certificate import LONG_PASS, MICRO_BATCH, MODELS, as_rows, measure
    from ..report.tables import render_table

    problems = _problems(args, list(MODELS))
    if problems:
        raise ValueError("; ".join(problems) + ".\nHINT: `lipdp bench` without options takes about a minute.")
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        costs = [
            cost
            for name in args.model
            for cost in measure(name, args.batch_size, args.repeats, args.steps, args.update_size)
        ]
    finally:
        torch.set_num_threads(before)
    if args.json:
        sys.stdout.write(json.dumps(as_rows(costs), indent=1) + "\n")
        return 0
    headers = (
        "model", "parameters", "batch", "passes", "forward+backward s", "exact cert. s", "cheap cert. s",
        "projection s/step", "exact norms/step", "amortised s/step", "% of step",
    )  # fmt: skip
    rows = [
        (
            cost.model, cost.parameters, cost.batch_size, cost.passes, cost.forward_backward, cost.exact_certificate,
            cost.cheap_certificate, cost.projection, cost.refreshes_per_step, cost.amortised, cost.percent_of_step,
        )
        for cost in costs
    ]  # fmt: skip
    slack = f"slack {costs[0].slack:g}"
    timing = "processor time" if args.threads == 1 else "wall time"
    title = f"Cost of the certificate per step: updates of {100 * args.update_size:g} %, {slack}, {args.steps} steps"
    sys.stdout.write(render_table(headers, rows, title=title) + "\n")
    sys.stdout.write(
        f"{timing}, threads: {args.threads}; passes beyond {LONG_PASS:g} s are measured once, "
        f"batches beyond {MICRO_BATCH} passed in parts\n"
    )
    return 0
