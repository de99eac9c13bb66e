"""Draws reliability diagrams, confidence histograms and coverage, as measured by `callbacks.CalibrationMetrics`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lipdp_lightning.extras import is_installed
from lipdp_lightning.report.figure_style import COLOURS, FONT_SIZE, new_axes_grid, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

__all__ = ["calibration_alt", "calibration_figures", "class_diagrams", "coverage_diagram", "reliability_diagram"]

Bins = Mapping[str, Sequence[Any]]  # rows, predicted and observed, by bin
MOST_CLASSES = 20
_COLUMNS = 5
_FEW = 20  # bins with fewer rows are drawn pale


def calibration_figures(result: Mapping[str, Any]) -> dict[str, Figure]:
    """Returns every figure of a result, by name; none without matplotlib."""
    if not is_installed("matplotlib"):
        return {}
    if result["task"] == "regression":
        return {"coverage": coverage_diagram(result)}
    figures = {"reliability": reliability_diagram(result)}
    if len(result["scores"]["per_class"]) > 2:
        figures["classes"] = class_diagrams(result)
    elif result["scores"]["per_class"]:
        figures["positives"] = positives_diagram(result)
    return figures


def reliability_diagram(result: Mapping[str, Any]) -> Figure:
    """Plots accuracy per bin of confidence with its gap to the diagonal, above the number of rows in each bin."""
    scores = result["scores"]
    title = f"Reliability, {result['stage']} rows\n{_errors(scores)}"
    words = ("confidence", "confidence", "accuracy")
    return _diagram_figure(scores["diagram"], title, words, result)


def positives_diagram(result: Mapping[str, Any]) -> Figure:
    """Plots, for two classes, the predicted probability of class 1 and the share of rows that were class 1."""
    scores = result["scores"]["per_class"][1]
    title = f"Class 1, {result['stage']} rows\n{_errors(scores)}"
    words = ("probability of class 1", "probability", "share of class 1")
    return _diagram_figure(scores["diagram"], title, words, result)


def _diagram_figure(diagram: Bins, title: str, words: tuple[str, str, str], result: Mapping[str, Any]) -> Figure:
    figure, ((upper,), (lower,)) = new_axes_grid(title, (2, 1), height=5.2, height_ratios=(3, 1), sharex=True)
    _draw_bars(upper, diagram)
    plain(upper.set_ylabel(words[2], fontsize=FONT_SIZE, color=COLOURS.ink))
    upper.set_ylim(0, 1)
    _percent_axis(upper.yaxis)
    _draw_histogram(lower, diagram)
    plain(lower.set_xlabel(f"predicted {words[0]}", fontsize=FONT_SIZE, color=COLOURS.ink))
    plain(lower.set_ylabel("rows", fontsize=FONT_SIZE, color=COLOURS.ink))
    lower.set_xlim(0, 1)
    _percent_axis(lower.xaxis)
    predicted, observed = _mean(diagram, "predicted"), _mean(diagram, "observed")
    lower.axvline(predicted, color=COLOURS.second, linewidth=1.4, linestyle="--",
                  label=f"mean {words[1]} {_percent(predicted)}")  # fmt: skip
    lower.axvline(observed, color=COLOURS.ink, linewidth=1.4, label=f"{words[2]} {_percent(observed)}")
    lines = [axes.get_lines()[i] for axes, i in ((upper, 0), (lower, 0), (lower, 1))]
    signs = ("over-confident", "under-confident") if words[0] == "confidence" else ("predicted more", "predicted less")
    _legend(figure, [*_bar_handles(*signs), *lines], result, columns=2)
    return figure


def _filled(diagram: Bins) -> Iterator[tuple[int, int, float, float]]:
    """Yields index, rows, predicted mean and observed share of each bin that holds rows."""
    for index, n in enumerate(diagram["rows"]):
        if n:
            yield index, n, diagram["predicted"][index], diagram["observed"][index]


def _mean(diagram: Bins, name: str) -> float:
    values = zip(diagram["rows"], diagram[name], strict=True)
    return math.fsum(n * value for n, value in values if n) / max(sum(diagram["rows"]), 1)


def _draw_bars(axes: Axes, diagram: Bins) -> None:
    """Draws a bar up to the observed share; the part between it and the predicted mean is hatched, and filled where the
    observed share is larger.
    """
    width = 1 / len(diagram["rows"])
    axes.plot([0, 1], [0, 1], color=COLOURS.ink, linewidth=1.1, linestyle=":", label="perfect calibration", zorder=4)
    for index, n, mean, share in _filled(diagram):
        left, solid = index * width, min(mean, share)
        fill = COLOURS.soft if share > mean else COLOURS.surface
        axes.bar(left, solid, width, align="edge", color=COLOURS.first, alpha=0.45 if n < _FEW else 1.0,
                 edgecolor=COLOURS.surface, linewidth=0.8)  # fmt: skip
        axes.bar(left, max(mean, share) - solid, width, bottom=solid, align="edge", facecolor=fill, hatch="////",
                 edgecolor=COLOURS.second, linewidth=0.8)  # fmt: skip


def _bar_handles(over: str, under: str) -> list[Patch]:
    from matplotlib.patches import Patch

    hatched: dict[str, Any] = {"hatch": "////", "edgecolor": COLOURS.second}
    return [
        Patch(facecolor=COLOURS.first, label="observed"),
        Patch(facecolor=COLOURS.surface, label=f"gap, {over}", **hatched),
        Patch(facecolor=COLOURS.soft, label=f"gap, {under}", **hatched),
    ]


def _draw_histogram(axes: Axes, diagram: Bins) -> None:
    width = 1 / len(diagram["rows"])
    lefts = [index * width for index in range(len(diagram["rows"]))]
    axes.bar(lefts, diagram["rows"], width, align="edge", color=COLOURS.soft, edgecolor=COLOURS.surface, linewidth=0.8)
    axes.locator_params("y", nbins=3, integer=True)


def class_diagrams(result: Mapping[str, Any]) -> Figure:
    """Plots one small diagram per class against the rest; if there are many classes, those of the largest ECE."""
    every = list(enumerate(result["scores"]["per_class"]))
    every.sort(key=lambda pair: -_value(pair[1]["ece"]))
    shown = sorted(every[:MOST_CLASSES], key=lambda pair: pair[0])
    columns = min(_COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    which = "" if len(shown) == len(every) else f", the {len(shown)} of largest ECE"
    title = f"Each class against the rest, {result['stage']} rows{which}"
    figure, grid = new_axes_grid(title, (rows, columns), height=0.75 + 1.25 * rows, width=7.0, sharex=True, sharey=True)
    places = [axes for line in grid for axes in line]
    for axes, (index, scores) in zip(places, shown, strict=False):
        _draw_bars(axes, scores["diagram"])
        head = axes.set_title(f"class {index}: ECE {_percent(scores['ece'])}", fontsize=FONT_SIZE - 1, loc="left")
        plain(head).set_color(COLOURS.ink)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_xticks([0, 0.5, 1])
        axes.set_yticks([0, 0.5, 1])
        _percent_axis(axes.xaxis)
        _percent_axis(axes.yaxis)
        axes.tick_params(labelsize=FONT_SIZE - 2)
    for index, axes in enumerate(places):
        axes.set_visible(index < len(shown))
        axes.tick_params(labelbottom=index + columns >= len(shown))
    plain(figure.supylabel("share of the class", fontsize=FONT_SIZE, color=COLOURS.ink))
    plain(grid[-1][0].set_xlabel("predicted", fontsize=FONT_SIZE - 1, color=COLOURS.ink))
    handles = [*_bar_handles("predicted more", "predicted less"), places[0].get_lines()[0]]
    _legend(figure, handles, result, columns=4)
    return figure


def coverage_diagram(result: Mapping[str, Any]) -> Figure:
    """Plots the share of targets inside the central interval of each level."""
    scores = result["scores"]
    error, largest = _percent(scores["mean_error"]), _percent(scores["maximum_error"])
    title = f"Coverage, {result['stage']} rows\nmean error {error}, largest {largest}"
    figure, ((axes,),) = new_axes_grid(title, (1, 1), height=4.4)
    levels, shares = list(scores["levels"]), list(scores["coverage"])
    axes.plot([0, 1], [0, 1], color=COLOURS.muted, linewidth=1.0, linestyle=":", label="perfect coverage")
    axes.fill_between(levels, levels, shares, facecolor="none", hatch="////", edgecolor=COLOURS.second, linewidth=0,
                      label="gap to nominal")  # fmt: skip
    axes.plot(levels, shares, "o-", color=COLOURS.first, linewidth=1.8, markersize=4.5, label="observed")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    _percent_axis(axes.xaxis)
    _percent_axis(axes.yaxis)
    plain(axes.set_xlabel("nominal coverage", fontsize=FONT_SIZE, color=COLOURS.ink))
    plain(axes.set_ylabel("empirical coverage", fontsize=FONT_SIZE, color=COLOURS.ink))
    _legend(figure, axes.get_legend_handles_labels()[0], result, columns=3)
    return figure


def calibration_alt(name: str, result: Mapping[str, Any]) -> str:
    """Returns a description of a figure for readers who cannot see it."""
    scores = result["scores"]
    if result["task"] == "regression":
        pairs = zip(scores["levels"], scores["coverage"], strict=True)
        listed = ", ".join(f"{_percent(share)} at {_percent(level)}" for level, share in pairs)
        return f"Line plot of empirical against nominal coverage: {listed}."
    if name == "classes":
        return "Reliability diagrams of each class; their errors are in the table of classes."
    chosen = scores["per_class"][1] if name == "positives" else scores
    parts = [
        f"{_percent(share)} observed where {_percent(mean)} was predicted ({n} rows)"
        for _, n, mean, share in _filled(chosen["diagram"])
    ]
    return f"Reliability diagram and histogram, {_errors(chosen)}: {'; '.join(parts)}."


def _legend(figure: Figure, handles: list[Any], result: Mapping[str, Any], columns: int) -> None:
    box = figure.legend(
        handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=FONT_SIZE - 1,
        labelcolor=COLOURS.ink, title=f"Computed on {result['computed_on']}", title_fontsize=FONT_SIZE - 1,
        alignment="left",
    )  # fmt: skip
    box.get_title().set_color(COLOURS.muted)
    for text in (*box.get_texts(), box.get_title()):
        plain(text)


def _errors(scores: Mapping[str, Any]) -> str:
    return f"ECE {_percent(scores['ece'])}, MCE {_percent(scores['mce'])}"


def _percent_axis(axis: Any) -> None:
    axis.set_major_formatter(lambda value, _: f"{100 * value:g} %")


def _value(number: float | None) -> float:
    return -math.inf if number is None or math.isnan(number) else number


def _percent(number: float | None) -> str:
    return "undefined" if number is None or math.isnan(number) else f"{100 * number:.1f} %"
