"""Draws the plots of findings in the style of a run's report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..report.figure_style import COLOURS, label_axes, legend, new_figure, shorten
from .findings import PlotData

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TONES = (COLOURS.first, COLOURS.second, COLOURS.muted, COLOURS.ink)
_DASHES = ("-", "--", "-.", ":")
_MOST_POINTS = 400


def draw(plot: PlotData) -> Figure:
    """Returns a figure of the plot's curves; points that are not finite are left out."""
    figure, axes = new_figure(shorten(plot.title, 48))
    for index, curve in enumerate(plot.curves):
        tone, dash = _TONES[index % len(_TONES)], _DASHES[index % len(_DASHES)]
        x, y = np.asarray(curve.x, dtype=float), np.asarray(curve.y, dtype=float)
        kept = np.isfinite(x) & np.isfinite(y)
        x, y, label = x[kept], y[kept], shorten(curve.label, 40)
        if curve.style == "bars":
            width = 0.9 * float(np.diff(x).min()) if len(x) > 1 else 0.8
            axes.bar(x, y, width=width, color=COLOURS.soft if index == 0 else tone, label=label)
        elif curve.style == "points":
            every = max(1, len(x) // _MOST_POINTS)
            axes.plot(x[::every], y[::every], "o", color=tone, markersize=4, alpha=0.75, label=label)
        else:
            axes.plot(x, y, color=tone, linestyle=dash, linewidth=1.8, label=label)
    if plot.log_x:
        axes.set_xscale("log")
    if plot.log_y:
        axes.set_yscale("log")
    if all(float(x).is_integer() for curve in plot.curves if curve.style == "bars" for x in curve.x) and not plot.log_x:
        axes.locator_params(axis="x", integer=True)
    label_axes(axes, plot.x_label, plot.y_label)
    legend(axes)
    return figure


def describe(plot: PlotData) -> str:
    """Returns a description of the plot for readers who cannot see it."""
    curves = "; ".join(f"{c.label}, {len(c.x)} points" for c in plot.curves)
    return f"{plot.title}: {plot.y_label} against {plot.x_label}. {curves}. The numbers are in audit.json."
