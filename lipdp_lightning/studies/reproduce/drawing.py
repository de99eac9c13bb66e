"""Draws lines over means of repetitions, in the style of the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lipdp_lightning.studies.reproduce.entry import Rows
from lipdp_lightning.studies.reproduce.summary import mean_and_deviation, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LONGEST_OF_TWO = 24  # longest label, in characters, that leaves room for two columns
_STYLES = ("-", "--", ":", "-.")


def means_against(rows: Rows, x: str, y: str) -> tuple[list[float], list[float], list[float]]:
    """Returns the values of x in order, and the mean and deviation of y at each."""
    places = sorted({number(row[x]) for row in rows})
    found = [mean_and_deviation([number(row[y]) for row in rows if number(row[x]) == place]) for place in places]
    return places, [mean for mean, _ in found], [deviation for _, deviation in found]


def lines(
    title: str,
    x_label: str,
    y_label: str,
    curves: Sequence[tuple[str, Rows, str, str]],
    logarithmic: str = "xy",
    level: float | None = None,
) -> Figure:
    """Draws one line per (label, rows, column of x, column of y): means, and a band of one deviation of the runs."""
    import matplotlib

    from lipdp_lightning.report.figure_style import COLOURS, label_axes, legend, new_figure

    columns = 2 if max(len(label) for label, *_ in curves) <= _LONGEST_OF_TWO else 1
    figure, axes = new_figure(title, height=3.1 + 0.2 * (-(-len(curves) // columns)))
    colours = matplotlib.colormaps["tab10"]
    for i, (label, rows, x, y) in enumerate(curves):
        places, means, deviations = means_against(rows, x, y)
        style: dict[str, Any] = {"color": colours(i), "linestyle": _STYLES[i % len(_STYLES)], "linewidth": 1.5}
        axes.plot(places, means, marker="o", markersize=3, label=label, **style)
        if any(deviations):
            low = [max(m - d, m / 10) for m, d in zip(means, deviations, strict=True)]
            high = [m + d for m, d in zip(means, deviations, strict=True)]
            axes.fill_between(places, low, high, color=colours(i), alpha=0.12, linewidth=0)
    if level is not None:
        axes.axhline(level, color=COLOURS.muted, linewidth=0.8)
    if "x" in logarithmic:
        axes.set_xscale("log")
    if "y" in logarithmic:
        axes.set_yscale("log")
    label_axes(axes, x_label, y_label)
    legend(axes, columns=columns)
    return figure
