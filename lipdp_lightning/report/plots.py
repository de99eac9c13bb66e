"""Draws the plots of a report: functions from a run's facts to a matplotlib figure, and the list of them.

Each function works with any history, including an empty one, and its figure can be logged as an image.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lipdp_lightning.extras import is_installed
from lipdp_lightning.report.figure_style import (
    COLOURS,
    empty_figure,
    label_axes,
    legend,
    new_figure,
    note,
    shorten,
)
from lipdp_lightning.report.formats import format_bound, format_number, is_number, plain_value
from lipdp_lightning.report.model import RunFacts
from lipdp_lightning.report.plots_layers import noise_and_signal, sensitivities, weight_norms
from lipdp_lightning.report.words import find_primary_metric, format_metric, is_fraction, metric_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "LAYER_PLOTS",
    "TRAINING_PLOTS",
    "Plot",
    "all_figures",
    "epsilon_against_steps",
    "metric_against_epsilon",
]

# This is enough for a curve of this size; a page must not grow with the number of steps.
MOST_POINTS = 400
MOST_CURVES = 5
SIGNAL_KEY = "gradient_to_noise"


def _series(facts: RunFacts, x: str, y: str) -> list[tuple[float, float]]:
    """Returns the finite (x, y) pairs of the history, thinned to MOST_POINTS with both ends kept."""
    points = []
    for row in facts.history:
        pair = (plain_value(row.get(x)), plain_value(row.get(y)))
        if all(is_number(value) and math.isfinite(value) for value in pair):
            points.append((float(pair[0]), float(pair[1])))
    if len(points) > MOST_POINTS:
        last = len(points) - 1
        points = [points[round(i * last / (MOST_POINTS - 1))] for i in range(MOST_POINTS)]
    return points


def _final_point(facts: RunFacts, metric: str, by_epsilon: bool) -> list[tuple[float, float]]:
    value = plain_value(facts.metrics.get(metric))
    spent = facts.epsilon_taken if facts.epsilon_taken is not None else facts.epsilon
    position = spent if by_epsilon else facts.steps_taken
    if is_number(value) and math.isfinite(value) and position is not None:
        return [(float(position), float(value))]
    return []


def metric_points(facts: RunFacts, metric: str) -> tuple[list[tuple[float, float]], bool]:
    """Returns the metric's curve, and whether it is against epsilon (steps are used where no epsilon may be shown)."""
    if facts.certified:
        points = _series(facts, "epsilon", metric)
        if points:
            return points, True
    points = _series(facts, "step", metric)
    if points:
        return points, False
    return _final_point(facts, metric, facts.certified), facts.certified


def metric_against_epsilon(facts: RunFacts, metric: str | None = None) -> Figure:
    """Plots the accuracy (or loss) that each amount of privacy bought; against steps if the run is not certified."""
    facts = facts.public()
    metric = metric or find_primary_metric(facts)
    if metric is None:
        return empty_figure("Accuracy and privacy", "no validation was run")
    name = shorten(metric_label(metric), 32)
    points, by_epsilon = metric_points(facts, metric)
    title = f"{name} against {'epsilon' if by_epsilon else 'steps'}"
    if not points:
        return empty_figure(title, "no validation was run")
    figure, axes = new_figure(title)
    xs, ys = zip(*points, strict=True)
    marker = "o" if len(points) <= 40 else ""
    axes.plot(xs, ys, color=COLOURS.first, linewidth=2, marker=marker, markersize=5)
    axes.plot(xs[-1], ys[-1], "o", color=COLOURS.first, markersize=7)
    label = format_metric(metric, ys[-1])
    note(
        axes,
        xs[-1],
        ys[-1],
        label,
        offset=(-2, 11),
        ha="right" if len(points) > 1 else "center",
        fontweight="bold",
    )
    if is_fraction(metric, list(ys)):
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.margins(x=0.05, y=0.18)
    if min(xs) >= 0:
        axes.set_xlim(left=0)
    if len(points) == 1:
        axes.set_xlim(0, 1.6 * max(xs[0], 1e-9))
    label_axes(axes, "epsilon spent" if by_epsilon else "step", name)
    return figure


def epsilon_against_steps(facts: RunFacts) -> Figure:
    """Plots how the privacy budget was spent, and the guarantee of the plan."""
    title = "Epsilon against steps"
    if not facts.certified or facts.epsilon is None:
        return empty_figure(title, "certified: false. There is no epsilon to show.")
    figure, axes = new_figure(title)
    points = _series(facts, "step", "epsilon")
    if facts.epsilon_taken is not None and (not points or points[-1][0] < facts.steps_taken):
        points.append((float(facts.steps_taken), float(facts.epsilon_taken)))
    if points:
        xs, ys = zip(*points, strict=True)
        # Two points do not show the shape of the curve, so no line is drawn between them.
        line, marker = "-" if len(points) > 2 else "none", "o" if len(points) <= 40 else ""
        axes.plot(xs, ys, color=COLOURS.first, linewidth=2, markersize=5, linestyle=line, marker=marker)
        axes.plot(xs[-1], ys[-1], "o", color=COLOURS.first, markersize=6, label="taken", zorder=4)
    axes.axhline(facts.epsilon, color=COLOURS.second, linewidth=1.8, linestyle=(0, (5, 3)), label="guarantee")
    axes.plot(
        facts.steps_planned,
        facts.epsilon,
        "D",
        color=COLOURS.surface,
        markeredgecolor=COLOURS.second,
        markeredgewidth=1.8,
        markersize=11,
        zorder=3,
        label="planned",
    )
    axes.set_xlim(0, 1.06 * max(facts.steps_planned, 1))
    highest = max([facts.epsilon, *(y for _, y in points)])
    axes.set_ylim(0, 1.22 * max(highest, 1e-9))
    note(axes, 0, facts.epsilon, f"ε = {format_bound(facts.epsilon)}", offset=(6, 9), fontweight="bold")
    if facts.stopped_early:
        axes.axvline(facts.steps_taken, color=COLOURS.muted, linewidth=1, linestyle=":")
        note(axes, facts.steps_taken, 0, "stopped", offset=(4, 8), color=COLOURS.muted)
    axes.locator_params("x", nbins=6, integer=True)
    label_axes(axes, "step", "epsilon spent")
    legend(axes, columns=3)
    return figure


def gradient_to_noise(facts: RunFacts) -> Figure | None:
    """Plots the ratio of released gradient to noise over the run; returns None if it was not recorded."""
    keys = list(dict.fromkeys(key for row in facts.history for key in row if str(key).startswith(SIGNAL_KEY)))
    curves = [(key, _series(facts, "step", key)) for key in keys]
    curves = [(key, points) for key, points in curves if points][:MOST_CURVES]
    if not curves:
        return None
    figure, axes = new_figure("Gradient to noise ratio")
    tones = (COLOURS.first, COLOURS.second, COLOURS.muted, COLOURS.soft, COLOURS.ink)
    dashes = ("-", "--", "-.", ":", "-")
    for (key, points), colour, dash in zip(curves, tones, dashes, strict=False):
        marker = "o" if len(points) <= 40 else ""
        label = shorten(key.removeprefix(SIGNAL_KEY).strip("/._") or "all layers")
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=colour, linestyle=dash, linewidth=2, marker=marker, markersize=4, label=label)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.locator_params("x", nbins=6, integer=True)
    label_axes(axes, "step", "gradient / noise")
    if len(curves) > 1:
        legend(axes, columns=3)
    return figure


def _metric_alt(facts: RunFacts) -> str:
    metric = find_primary_metric(facts.public())
    points, by_epsilon = metric_points(facts.public(), metric) if metric else ([], False)
    if metric is None or not points:
        return "No validation was run."
    unit = "epsilon" if by_epsilon else "step"
    written = format_bound if by_epsilon else format_number
    ends = [f"{format_metric(metric, y)} at {unit} {written(x)}" for x, y in (points[0], points[-1])]
    return f"Line plot of {metric}: " + (ends[0] if len(points) == 1 else f"from {ends[0]} to {ends[1]}") + "."


def _epsilon_alt(facts: RunFacts) -> str:
    if not facts.certified or facts.epsilon is None:
        return "No plot: the run is not certified."
    spent = "" if facts.epsilon_taken is None else f" {format_bound(facts.epsilon_taken)} for those taken;"
    return (
        f"Epsilon over the steps:{spent} the guarantee is {format_bound(facts.epsilon)} for "
        f"{facts.steps_planned} planned steps, of which {facts.steps_taken} were taken."
    )


@dataclass(frozen=True)
class Plot:
    """A plot, a description for readers who cannot see it, and a caption that tells how to read it.

    ``uncertified`` replaces the caption where nothing is certified.
    """

    name: str
    draw: Callable[[RunFacts], Figure | None]
    alt: Callable[[RunFacts], str]
    caption: str
    uncertified: str = ""

    def caption_for(self, facts: RunFacts) -> str:
        return self.caption if facts.certified or not self.uncertified else self.uncertified


TRAINING_PLOTS = (
    Plot(
        "metric",
        metric_against_epsilon,
        _metric_alt,
        "What each amount of privacy bought.",
        "Measured during the run.",
    ),
    Plot(
        "epsilon",
        epsilon_against_steps,
        _epsilon_alt,
        "Every step spends some of the budget. The guarantee is the dashed line, whichever step was last.",
        "Without a certificate there is no epsilon.",
    ),
    Plot(
        "gradient-to-noise",
        gradient_to_noise,
        lambda facts: "Line plot of the gradient to noise ratio over the steps.",
        "Below one, a single step carries more noise than gradient.",
    ),
)
LAYER_PLOTS = (
    Plot(
        "sensitivity",
        sensitivities,
        lambda facts: "Horizontal bars: sensitivity of each layer; the numbers are in the table of layers.",
        "How far one example can move a layer's summed gradient.",
        "What the noise was calibrated to. One example may move the sum further than this.",
    ),
    Plot(
        "noise",
        noise_and_signal,
        lambda facts: "Noise and signal of each layer; the noise is in the table of layers.",
        "Layers whose noise lies far to the right of the signal learn little from a single step.",
        "The signal is computed from sensitivities that are not certified.",
    ),
    Plot(
        "weight-norm",
        weight_norms,
        lambda facts: "Horizontal bars: weight norm and maximum norm of each layer, as in the table of layers.",
        "Layers on their bound are those the projection holds back.",
    ),
)


def all_figures(facts: RunFacts) -> dict[str, Figure]:
    """Returns every plot that has something to show, by name, to be logged as images; none without matplotlib."""
    if not is_installed("matplotlib"):
        return {}
    facts = facts.public()
    drawn = {plot.name: plot.draw(facts) for plot in (*TRAINING_PLOTS, *LAYER_PLOTS)}
    return {name: figure for name, figure in drawn.items() if figure is not None}
