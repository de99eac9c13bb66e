"""Implements ``lipdp curves``: releases a distribution function, an ROC curve or a calibration test of a CSV column."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..bound_text import upper_text
from ..report.show import show
from .option_parser import OptionParser

if TYPE_CHECKING:
    from ..curves import CurveRelease, Grid, NoiseSource
    from ..curves.discrete_noise import FloatArray


# the level is simulated, and the number of draws grows with 1 / (1 - level)
MOST_CONFIDENCE = 0.9999


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, parser_class=OptionParser)
    ecdf = kinds.add_parser("ecdf", help="release a distribution function, with quantiles and a confidence band")
    roc = kinds.add_parser(
        "roc", help="release an ROC curve and the area under it; larger scores mean the positive class"
    )
    hl = kinds.add_parser("hl", help="release the Hosmer-Lemeshow test and its groups")
    for kind in (ecdf, roc, hl):
        _shared(kind)
    for kind in (ecdf, roc):
        kind.add_argument(
            "--range", metavar="LO,HI", help="declared range of the column; --range=-1,1 if LO is negative"
        )
        kind.add_argument(
            "--range-budget",
            type=float,
            metavar="SHARE",
            help="share of epsilon that is spent to find the range (default 0.1)",
        )
        kind.add_argument(
            "--base", type=int, default=2, help="branching factor of the trees of laplace and gaussian (default 2)"
        )
        kind.add_argument("--smooth", type=int, choices=(1, 2), default=2, help="norm of the smoothing (default 2)")
        kind.add_argument(
            "--metric", choices=("points", "tree"), default="points", help="metric of the smoothing (default points)"
        )
    ecdf.add_argument("--quantiles", default="0.05,0.25,0.5,0.75,0.95", metavar="P,P,..", help="quantiles to list")
    ecdf.add_argument("--sampling", action="store_true", help="make the band cover the population, not the data alone")
    for kind in (roc, hl):
        kind.add_argument("--label", required=True, metavar="NAME", help="column of the true classes")
        kind.add_argument("--positive", default="1", metavar="TEXT", help="value of the positive class (default 1)")
    hl.add_argument("--groups", type=int, default=10, help="number of groups (default 10)")
    hl.add_argument("--fitted", action="store_true", help="state that the model was fitted to these same records")
    from ..studies.parties import simulate

    simulate.add_arguments(
        kinds.add_parser("simulate", help="simulate the protocols between parties, and measure what they send")
    )
    compare = kinds.add_parser("compare", help="compare errors and running times of the mechanisms on made-up data")
    compare.add_argument("--levels", type=int, default=12, help="the grid has 2^LEVELS cells (default 12)")
    compare.add_argument("--epsilon", type=float, default=1.0, help="epsilon of each mechanism (default 1)")
    compare.add_argument("--delta", type=float, default=1e-6, help="delta of mechanisms that need one (default 1e-6)")
    compare.add_argument("--repeats", type=int, default=100, help="number of releases to average (default 100)")


def _shared(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("--data", required=True, metavar="FILE", help="CSV with a header, also .csv.gz")
    kind.add_argument("--column", required=True, metavar="NAME", help="column of the values, scores or probabilities")
    kind.add_argument("--delimiter", default=",", help="delimiter of the CSV (default a comma)")
    kind.add_argument("--epsilon", type=float, required=True, help="epsilon of all releases together")
    kind.add_argument(
        "--delta",
        type=float,
        default=0.0,
        help="delta, for gaussian and factorization (default 0, which is pure differential privacy)",
    )
    kind.add_argument(
        "--mechanism",
        choices=("laplace", "gaussian", "factorization"),
        default="laplace",
        help="mechanism (default laplace)",
    )
    kind.add_argument(
        "--adjacency",
        choices=("replace_one", "add_remove"),
        default="replace_one",
        help="relation of neighbouring data (default replace_one)",
    )
    kind.add_argument("--levels", type=int, default=10, help="the grid has 2^LEVELS cells (default 10)")
    kind.add_argument("--confidence", type=float, default=0.95, help="confidence of bands and intervals (default 0.95)")
    kind.add_argument("--output", required=True, metavar="DIR", help="directory for the JSON, the CSV and the plot")


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns 0 with the files written; bad input raises before anything is drawn, written or
    charged.
    """
    if args.kind == "simulate":
        from ..studies.parties import simulate

        return simulate.run(args)
    if args.kind == "compare":
        return _compare(args)
    from ..curves.columns import check_new
    from ..curves.releases import check_privacy
    from ..extras import require

    require("matplotlib", "the plot")
    names = [f"{args.kind}.{ending}" for ending in ("json", "csv", "png")]
    check_privacy(args.epsilon, args.delta, args.adjacency)
    if not 0 < args.confidence <= MOST_CONFIDENCE:
        raise ValueError(f"--confidence {args.confidence} is not in (0, {MOST_CONFIDENCE}]. HINT: use 0.95.")
    if len(args.delimiter) != 1:
        raise ValueError(f"--delimiter {args.delimiter!r} is not one character. HINT: use ';' or ','.")
    check_new(args.output, names)
    content, columns, figure = {"ecdf": _ecdf, "roc": _roc, "hl": _hosmer_lemeshow}[args.kind](args)
    _write(args, names, content, columns, figure)
    return 0


def _write(args: Any, names: list[str], content: dict[str, Any], columns: Any, figure: Any) -> None:
    from ..curves import ReleaseList
    from ..curves.columns import csv_text, write_new
    from ..report.figure_style import figure_to_png

    releases = ReleaseList()
    for release in content.pop("releases"):
        releases.record(release)
    stated = {"kind": args.kind, "column": args.column, "adjacency": args.adjacency, "privacy": releases.to_dict()}
    text = json.dumps({**stated, **content}, indent=2, allow_nan=False) + "\n"
    contents = [text.encode(), csv_text(columns).encode(), figure_to_png(figure)]
    paths = write_new(args.output, dict(zip(names, contents, strict=True)))
    spent = f"epsilon {upper_text(releases.epsilon, 6)}" + (
        f", delta {upper_text(releases.delta)}" if releases.delta else ""
    )
    show(f"{spent} ({args.adjacency}) spent on {', '.join(r.name for r in releases)}\n")
    show("".join(f"{path}\n" for path in paths))


def _values(args: Any) -> tuple[FloatArray, Any]:
    """Returns the column, and the labels if the command has them."""
    from ..curves.columns import as_numbers, read_texts

    label = getattr(args, "label", None)
    texts = read_texts(args.data, [args.column] + ([label] if label else []), args.delimiter)
    values = as_numbers(texts[0], args.column)
    if label is None:
        return values, None
    if any(not text for text in texts[1]):
        raise ValueError(f"the column {label!r} has empty fields. HINT: remove those rows.")
    if len(set(texts[1])) > 2:
        raise ValueError(f"the column {label!r} has more than two classes. HINT: name a column of two classes.")
    if len(set(texts[1])) == 2 and args.positive not in texts[1]:
        raise ValueError(f"no label is {args.positive!r}, and there are two others. HINT: use --positive TEXT.")
    return values, [text == args.positive for text in texts[1]]


def _grid(args: Any, values: FloatArray) -> tuple[Grid | None, float]:
    """Returns the declared grid or None, and the epsilon that is left for the curve; all values are checked against the
    grid.
    """
    from ..curves import Grid

    if args.range is not None and args.range_budget is not None:
        raise ValueError("--range and --range-budget exclude each other. HINT: leave one of them out.")
    if args.range is None:
        share = 0.1 if args.range_budget is None else args.range_budget
        if not 0 < share < 1:
            raise ValueError(f"--range-budget {share} is not in (0, 1). HINT: use 0.1.")
        Grid(0.0, 1.0, args.levels)  # raises if the levels are wrong
        return None, args.epsilon * (1 - share)
    try:
        low, high = (float(text) for text in args.range.split(","))
    except ValueError:
        raise ValueError(f"--range {args.range!r} is not two numbers. HINT: use --range=-1,1.") from None
    grid = Grid(low, high, args.levels)
    grid.cells(values)
    return grid, args.epsilon


def _found(args: Any, values: FloatArray, rest: float, source: NoiseSource) -> tuple[Grid, list[CurveRelease]]:
    from ..curves import Grid, find_range

    found = find_range(values, args.epsilon - rest, args.adjacency, source)
    return Grid(found.low, found.high, args.levels), [found.release]


def _ecdf(args: Any) -> tuple[dict[str, Any], dict[str, FloatArray], Any]:
    from ..curves import NoiseSource, curve_mechanism, ecdf_band, private_ecdf, quantile
    from ..curves.curve_plots import plot_ecdf

    values, _ = _values(args)
    probabilities = _probabilities(args.quantiles)
    declared, epsilon = _grid(args, values)
    design = curve_mechanism(args.mechanism, args.levels, epsilon, args.delta, args.adjacency, 1, args.base)
    _check_metric(args)
    repeats = _repeats(args.confidence, 2 if args.sampling else 1)
    source = NoiseSource()
    grid, releases = (declared, []) if declared else _found(args, values, epsilon, source)
    curve = private_ecdf(values, grid, design, source, clamp=declared is None)
    smoothed = curve.smoothed(args.smooth, args.metric)
    band = ecdf_band(curve, args.confidence, args.sampling, repeats)
    rows = [
        {"probability": p, "value": quantile(smoothed, p), "interval": list(band.quantile_interval(grid.edges, p))}
        for p in probabilities
    ]
    content = {
        "releases": [*releases, curve.booking()],
        **_range_facts(grid, declared is not None),
        "records": curve.total if design.total_public else None,
        "records_noisy": None if design.total_public else curve.total,
        "quantiles": rows,
        "band": {"confidence": args.confidence, "includes_sampling": args.sampling},
    }
    columns = {
        "point": grid.points,
        "count_released": curve.counts,
        "smoothed": smoothed.fractions,
        "lower": band.lower,
        "upper": band.upper,
    }
    return content, columns, plot_ecdf(curve, smoothed, band)


def _roc(args: Any) -> tuple[dict[str, Any], dict[str, FloatArray], Any]:
    import numpy as np

    from ..curves import NoiseSource, curve_mechanism, private_roc
    from ..curves.curve_plots import plot_roc

    values, labels = _values(args)
    declared, epsilon = _grid(args, values)
    design = curve_mechanism(args.mechanism, args.levels, epsilon, args.delta, args.adjacency, 2, args.base)
    _check_metric(args)
    repeats = _repeats(args.confidence, 1)
    source = NoiseSource()
    grid, releases = (declared, []) if declared else _found(args, values, epsilon, source)
    curve = private_roc(values, labels, grid, design, source, clamp=declared is None)
    smoothed = curve.smoothed(args.smooth, args.metric)
    interval = curve.auc_interval(args.confidence, repeats)
    content = {
        "releases": [*releases, curve.booking()],
        **_range_facts(grid, declared is not None),
        "auc": curve.auc(),
        "auc_interval": {"bounds": list(interval), "confidence": args.confidence, "includes_sampling": False},
    }
    columns = {
        "threshold": grid.edges,
        "positives_released": np.concatenate([[0.0], curve.positives]),
        "negatives_released": np.concatenate([[0.0], curve.negatives]),
        "false_positive_rate": smoothed.false_positive_rate,
        "true_positive_rate": smoothed.true_positive_rate,
    }
    return content, columns, plot_roc(curve, interval)


def _hosmer_lemeshow(args: Any) -> tuple[dict[str, Any], dict[str, FloatArray], Any]:
    from ..curves import NoiseSource, private_hosmer_lemeshow
    from ..curves.curve_plots import plot_hosmer_lemeshow

    values, labels = _values(args)
    test = private_hosmer_lemeshow(
        values,
        labels,
        args.epsilon,
        NoiseSource(),
        args.groups,
        args.levels,
        args.adjacency,
        args.mechanism,
        args.delta,
    )
    content = {
        "releases": test.releases,
        "statistic": test.statistic,
        "p_value": test.p_value(),
        "p_value_ignoring_the_noise": test.chi_squared_p_value(args.fitted),
        "groups": len(test.thresholds) - 1,
    }
    names = ("expected_1", "expected_0", "observed_1", "observed_0")
    columns = {"above": test.thresholds[:-1], "up_to": test.thresholds[1:], **dict(zip(names, test.sums, strict=True))}
    return content, columns, plot_hosmer_lemeshow(test)


def _compare(args: Any) -> int:
    from ..curves import Grid
    from ..curves.releases import check_privacy
    from ..studies.curve_errors import compare_errors, compare_smoothing

    check_privacy(args.epsilon, args.delta)
    Grid(0.0, 1.0, args.levels)
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats} measures nothing. HINT: use 100.")
    rows = [asdict(row) for row in compare_errors(args.levels, args.epsilon, args.delta, args.repeats)]
    _table([{k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows])
    show("\n")
    smoothing = [asdict(row) for row in compare_smoothing(args.levels, args.epsilon)]
    _table([{k: f"{v:.3g}" if isinstance(v, float) else v for k, v in row.items()} for row in smoothing])
    return 0


def _table(rows: list[dict[str, Any]]) -> None:
    cells = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        show("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")


def _range_facts(grid: Grid, declared: bool) -> dict[str, Any]:
    how = "declared" if declared else "found with part of the budget; values outside were moved to its ends"
    return {"range": {"low": grid.low, "high": grid.high, "how": how}, "levels": grid.levels}


def _probabilities(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= p <= 1 for p in found):
        raise ValueError(f"--quantiles {text!r} are not probabilities. HINT: use 0.25,0.5,0.75.")
    return found


def _repeats(confidence: float, parts: int) -> int:
    """Returns the number of simulations that resolve the level."""
    return max(399, math.ceil(4 * parts / (1 - confidence)))


def _check_metric(args: Any) -> None:
    if args.metric == "tree" and args.mechanism == "factorization":
        raise ValueError("--metric tree needs noise on a tree. HINT: use --mechanism laplace or gaussian.")
