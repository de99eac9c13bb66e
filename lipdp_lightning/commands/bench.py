"""Implements ``lipdp bench``: measures the cost of a private step beside other ways to train the same network."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

QUICK_MODELS = ("convnet-1.6m",)
QUICK_BATCHES = (256, 1024)
QUICK_CONTENDERS = ("torch", "torch_poisson", "lightning", "joint", "layerwise", "exact", "opacus", "ghost")
ALL_BATCHES = (64, 128, 256, 512, 1024, 2048, 4096)
FULL_MODELS = ("convnet-1.6m", "mlp-table", "scattering-head", "wrn-16-4")
FIGURES = "figures"  # the directory beside the page into which plots are written
FEW_BATCHES = {"wrn-16-4": (64, 256)}  # models whose steps take seconds
BOTH_THREADS = ("convnet-1.6m",)  # with several threads the noise overlaps with the passes, with one it cannot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--full", action="store_true", help="all contenders on all models at batch sizes from 64 to 4096"
    )
    modes.add_argument(
        "--growth",
        action="store_true",
        help="fit exponents of a step's cost in batch size, depth and parameters instead",
    )
    modes.add_argument(
        "--check",
        nargs="?",
        const=Path(),
        type=Path,
        metavar="FILE",
        help="check ratios against the bounds of a YAML file instead (default: the library's); exit with 1 if exceeded",
    )
    parser.add_argument(
        "--room", type=float, default=1.0, metavar="FACTOR",
        help="with --check, loosen the bounds of step times by this factor, for an unknown machine (default: 1)",
    )  # fmt: skip
    modes.add_argument(
        "--certificate", action="store_true", help="measure certificate and projection per step, beside a pass, instead"
    )
    modes.add_argument(
        "--estimate",
        action="store_true",
        help="print an estimate on paper of steps on GPUs, and what it rests on, instead",
    )
    modes.add_argument(
        "--scaling", nargs="?", const="convnet-1.6m", metavar="MODEL",
        help="measure weak scaling instead: --processes processes against one, with the first --batch-size for each",
    )  # fmt: skip
    parser.add_argument("--model", nargs="+", help="models to measure (default: convnet-1.6m)")
    parser.add_argument(
        "--batch-size", nargs="+", type=int,
        help="batch sizes (default: 256 and 1024; with --full 64 to 4096, up to 256 for models with slow steps)",
    )  # fmt: skip
    parser.add_argument(
        "--contender", nargs="+", help=f"methods (default: {', '.join(QUICK_CONTENDERS)}); torch is always included"
    )
    parser.add_argument("--repeats", type=int, help="rounds of turns (default 5); passes of --certificate (default 3)")
    parser.add_argument(
        "--threads", type=int, help="threads of torch in every process (default: all processors; 1 with --certificate)"
    )
    parser.add_argument(
        "--device", default="cpu", help="cpu or cuda, whose events and memory are measured (default: cpu)"
    )
    parser.add_argument(
        "--memory-limit",
        type=float,
        metavar="GB",
        help="memory limit of each contender (default: 85 %% of the free memory)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write bench.json, bench.csv, bench.md and plots")
    parser.add_argument(
        "--page",
        type=Path,
        metavar="FILE",
        help="with --full or --growth, write tables, plots and the paper estimate into docs/performance.md",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument(
        "--update-size", type=float, default=0.002,
        help="with --certificate, the Frobenius norm of an update relative to that of its weight",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, default=200, help="with --certificate, the number of updates to project and certify"
    )
    parser.add_argument(
        "--processes", type=int, default=2, help="with --scaling, the number of processes, with one thread each"
    )


def run(args: argparse.Namespace) -> int:
    if args.scaling is not None:
        return _scaling(args)
    if args.check is not None:
        return _check(args)
    if args.estimate:
        from ..studies.performance_page import estimate_section

        sys.stdout.write(estimate_section())
        return 0
    if args.growth:
        return _growth(args)
    if args.certificate:
        return _certificate(args)
    return _compare(args)


# ---- contenders


def _compare(args: argparse.Namespace) -> int:
    from ..bench.compare import Effort, compare, machine, plan_of
    from ..bench.comparison_files import as_json, as_markdown, printed, write_all
    from ..bench.comparison_plots import write_figures
    from ..bench.contenders import CONTENDERS
    from ..studies.performance_page import update

    full = args.full
    models = args.model or (list(FULL_MODELS) if full else list(QUICK_MODELS))
    contenders = tuple(args.contender or (CONTENDERS if full else QUICK_CONTENDERS))
    _refuse(_comparison_problems(args, models, contenders))
    cells = _cells(args, models, contenders)
    _progress(plan_of(cells))
    effort = Effort(rounds=args.repeats or Effort.rounds)
    limit = None if args.memory_limit is None else round(args.memory_limit * 1e9)
    facts, rows = machine(args.device, {cell.threads for cell in cells}, limit), []
    for row in compare(cells, effort, device=args.device, memory_limit=limit, say=_progress):
        rows.append(row)
        if args.out is not None:  # written after every row, so that an interrupted comparison keeps its results
            write_all(args.out, rows, facts)
    if args.page is not None:
        figures = args.page.parent / FIGURES
        write_figures(figures, rows)
        update(args.page, {"steps": as_markdown(rows, facts, f"{FIGURES}/")})
    sys.stdout.write(as_json(rows, facts) if args.json else printed(rows, facts))
    if args.page is not None and full:
        _laws(args)
    return 0


def _cells(args: argparse.Namespace, models: list[str], contenders: tuple[str, ...]) -> list[Any]:
    """Returns the settings to compare; another number of threads changes times, but not the memory that is needed."""
    from ..bench.compare import Cell

    every, cells = args.threads or _processors(), []
    for model in models:
        both = args.full and args.threads is None and model in BOTH_THREADS
        batches = args.batch_size or (ALL_BATCHES if args.full else QUICK_BATCHES)
        if args.full and model in FEW_BATCHES:
            batches = [batch for batch in batches if batch in FEW_BATCHES[model]]
        for number, threads in enumerate(sorted({1, every}) if both else [every]):
            cells += [Cell(model, batch, contenders, threads, memory=number == 0) for batch in batches]
    return cells


def _growth(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from ..report.tables import render_table
    from ..studies import growth

    _refuse([*_counts(args), *_device_problems(args), *_page_problems(args)])
    laws = _laws(args)
    if args.json:
        sys.stdout.write(json.dumps([asdict(law) for law in laws], indent=1) + "\n")
    else:
        sys.stdout.write(render_table(growth.HEADERS, growth.lines(laws), title="Growth of a step's cost") + "\n")
    return 0


def _laws(args: argparse.Namespace) -> list[Any]:
    """Returns the fitted exponents; with --page it also writes what the page shows beside the steps."""
    from ..bench.compare import Effort, machine
    from ..studies import growth
    from ..studies import performance_page as page

    effort, threads = Effort(rounds=args.repeats or Effort.rounds), args.threads or _processors()
    facts = machine(args.device, [threads], None)
    laws = growth.measure(effort, device=args.device, threads=threads, say=_progress)
    if args.page is not None:
        section = page.growth_section(laws, args.page.parent / FIGURES, f"{FIGURES}/", facts)
        contents = {"growth": section, "memory": page.memory_section(), "estimate": page.estimate_section()}
        page.update(args.page, contents)
    return laws


def _page_problems(args: argparse.Namespace) -> list[str]:
    from ..studies.performance_page import SECTIONS, sections_of

    if args.page is None:
        return []
    if not args.page.is_file():
        return [f"--page {args.page} is not a file"]
    missing = set(SECTIONS) - set(sections_of(args.page.read_text(encoding="utf-8")))
    return [f"--page {args.page} lacks the sections {', '.join(sorted(missing))}"] if missing else []


def _comparison_problems(args: argparse.Namespace, models: list[str], contenders: tuple[str, ...]) -> list[str]:
    from ..bench.contenders import problem_of
    from ..bench.networks import network_named

    problems = []
    for model in models:
        try:
            network_named(model)
        except ValueError as error:
            problems.append(str(error))
    problems += [problem for name in contenders if (problem := problem_of(name)) is not None]
    return problems + _counts(args) + _device_problems(args) + _page_problems(args)


def _device_problems(args: argparse.Namespace) -> list[str]:
    import torch

    problems = []
    try:
        device = torch.device(args.device)
    except RuntimeError:
        return [f"--device {args.device} is not a device of torch"]
    if device.type not in ("cpu", "cuda"):
        problems.append(f"--device {args.device}: only cpu and cuda are measured")
    elif device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        problems.append(f"--device {args.device}: torch finds {torch.cuda.device_count()} GPUs")
    if args.memory_limit is not None:
        if not (math.isfinite(args.memory_limit) and args.memory_limit > 0):
            problems.append(f"--memory-limit {args.memory_limit} is not a positive number of GB")
        elif device.type == "cpu" and not os.path.exists("/proc/self/statm"):
            problems.append("--memory-limit: this system does not report the memory of a process")
    return problems


def _counts(args: argparse.Namespace) -> list[str]:
    counts = {"--repeats": args.repeats, "--threads": args.threads}
    counts["--batch-size"] = min(args.batch_size) if args.batch_size else None
    return [f"{option} {n} is not positive" for option, n in counts.items() if n is not None and n < 1]


def _refuse(problems: list[str], hint: str = "`lipdp bench` without options takes about two minutes.") -> None:
    if problems:
        raise ValueError("; ".join(problems) + f".\nHINT: {hint}")


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _progress(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


# ---- regression guard


def _check(args: argparse.Namespace) -> int:
    from ..bench.check import OWN_BOUNDS, check, printed, read_bounds, with_room

    room = [] if 1 <= args.room < math.inf else [f"--room {args.room} is not a number of at least 1"]
    _refuse([*_counts(args), *_device_problems(args), *room], "`lipdp bench --check` takes about two minutes.")
    bounds = with_room(read_bounds(OWN_BOUNDS if args.check == Path() else args.check), args.room)
    options = {} if args.repeats is None else {"rounds": args.repeats}
    # one thread, since two wait for each other whenever another process is busy
    verdicts = check(bounds, device=args.device, threads=args.threads or 1, say=_progress, **options)
    sys.stdout.write(printed(verdicts))
    return 0 if all(verdict.kept for verdict in verdicts) else 1


# ---- weak scaling


def _scaling(args: argparse.Namespace) -> int:
    from ..bench.certificate_cost import MODELS
    from ..bench.weak_scaling import as_row, measure_scaling, printed

    batch_size, repeats = (args.batch_size or [256])[0], 3 if args.repeats is None else args.repeats
    problems = [] if args.scaling in MODELS else [f"--scaling {args.scaling} is not one of {', '.join(MODELS)}"]
    if args.processes < 2:
        problems.append(f"--processes {args.processes} is below 2")
    if min(repeats, batch_size) < 1:
        problems.append(f"--repeats {repeats} or --batch-size {batch_size} is not positive")
    _refuse(problems, "`lipdp bench --scaling` takes about a minute.")
    row = as_row(measure_scaling(args.scaling, batch_size, args.processes, repeats))
    if args.json:
        sys.stdout.write(json.dumps(row, indent=1) + "\n")
        return 0
    sys.stdout.write(printed(row))
    return 0


# ---- certificate


def _certificate_problems(args: argparse.Namespace, models: list[str], known: list[str], repeats: int) -> list[str]:
    problems = [f"--model {name} is not one of {', '.join(known)}" for name in models if name not in known]
    problems += _counts(args)
    if args.steps < repeats:
        problems.append(f"--steps {args.steps} is below --repeats {repeats}: passes are taken between steps")
    if not (math.isfinite(args.update_size) and args.update_size > 0):
        problems.append(f"--update-size {args.update_size} is not a positive, finite number")
    return problems


def _certificate(args: argparse.Namespace) -> int:
    import torch

    from ..bench.certificate_cost import MODELS, as_rows, measure, printed

    models, batch_sizes = args.model or list(MODELS), args.batch_size or list(QUICK_BATCHES)
    repeats, threads = 3 if args.repeats is None else args.repeats, 1 if args.threads is None else args.threads
    _refuse(
        _certificate_problems(args, models, list(MODELS), repeats), "`lipdp bench --certificate` takes about a minute."
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        costs = [cost for name in models for cost in measure(name, batch_sizes, repeats, args.steps, args.update_size)]
    finally:
        torch.set_num_threads(before)
    text = json.dumps(as_rows(costs), indent=1) + "\n" if args.json else printed(costs, args.steps)
    sys.stdout.write(text)
    return 0
