"""Plots the trials of a search in the plane of two objectives."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import write_bytes_atomically
from ..report.atomic import write_atomically
from .objectives import Objective

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def front_figure(trials: Sequence[Any], best: Sequence[Any], objectives: Sequence[Objective]) -> Figure:
    """Plots all trials, and the front as steps: between two of its trials only the worse value of each is reached."""
    from ..report.figure_style import empty_figure, label_axes, legend, new_figure

    if not trials:
        return empty_figure("Trials", "no trial has finished")
    shown, x_of = _axes(objectives)
    y_index = objectives.index(shown)
    figure, axes = new_figure("Trials, and those that no other beats")
    points = [(x_of(t), t.values[y_index]) for t in trials]
    axes.scatter([x for x, _ in points], [y for _, y in points], s=18, color="0.65", label="trials", zorder=2)
    line = sorted((x_of(t), t.values[y_index]) for t in best)
    xs, ys = [x for x, _ in line], [y for _, y in line]
    axes.plot(xs, ys, drawstyle="steps-post", marker="o", markersize=4, label="front", zorder=3)
    label_axes(axes, "epsilon" if _epsilon(objectives) is not None else "trial", f"validation {shown.name}")
    if _epsilon(objectives) is not None and max(p[0] for p in points) > 8 * min(p[0] for p in points):
        _logarithmic(axes)
    legend(axes)
    return figure


def _logarithmic(axes: Axes) -> None:
    """Sets an axis of powers of two, written as numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _epsilon(objectives: Sequence[Objective]) -> int | None:
    return next((i for i, o in enumerate(objectives) if o.metric is None), None)


def _axes(objectives: Sequence[Objective]) -> tuple[Objective, Any]:
    index = _epsilon(objectives)
    shown = next(o for o in objectives if o.metric is not None)
    return shown, (lambda trial: trial.number) if index is None else (lambda trial: trial.values[index])


def write_figure(out: Path, name: str, figure: Figure) -> None:
    """Writes ``name``.png and ``name``.svg."""
    import matplotlib

    from ..report.figure_style import figure_to_png

    write_bytes_atomically(out / f"{name}.png", figure_to_png(figure))
    drawing = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(drawing, format="svg", metadata={"Date": None}, facecolor=figure.get_facecolor())
    write_atomically(out / f"{name}.svg", drawing.getvalue())
