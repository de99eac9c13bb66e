"""Draws plots with one row per layer: sensitivities, noise against signal, weight norms against their bound."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lipdp_lightning.report.figure_style import (
    COLOURS,
    FONT_SIZE,
    empty_figure,
    label_axes,
    legend,
    new_figure,
    note,
    plain,
    shorten,
)
from lipdp_lightning.report.formats import format_number, is_number, plain_value
from lipdp_lightning.report.model import RunFacts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["noise_and_signal", "sensitivities", "weight_norms"]

# One figure cannot show more rows than this legibly; the table of the report has all of them.
MOST_ROWS = 60
# Axes stay within what a float can hold, whatever a diverged run reports.
LARGEST_EXPONENT = 200


def _finite(group: dict[str, Any], key: str) -> float | None:
    value = plain_value(group.get(key))
    return float(value) if is_number(value) and math.isfinite(value) else None


def _rows(facts: RunFacts, key: str) -> list[dict[str, Any]]:
    """Returns the groups with a value under ``key``, in model order, at most MOST_ROWS of them."""
    return [group for group in facts.groups if _finite(group, key) is not None][:MOST_ROWS]


def _figure(title: str, rows: list[dict[str, Any]], facts: RunFacts) -> tuple[Figure, Axes]:
    left_out = len(facts.groups) - len(rows)
    if len(rows) == MOST_ROWS and left_out > 0:
        title += f" (first {MOST_ROWS} of {len(facts.groups)} layers)"
    figure, axes = new_figure(title, height=max(2.4, 1.4 + 0.27 * len(rows)), grid_axis="x")
    axes.set_yticks(range(len(rows)), [shorten(group.get("name", "?")) for group in rows])
    for text in axes.get_yticklabels():
        plain(text).set_color(COLOURS.ink)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return figure, axes


def _log_axis(axes: Axes, values: list[float], *, room_right: float) -> float:
    """Sets a logarithmic x axis around positive values and returns its left end."""
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    first = max(math.floor(math.log10(min(values)) - 0.3), -LARGEST_EXPONENT)
    last = math.log10(max(values))
    low, high = 10.0**first, 10.0 ** min(last + room_right * (last - first), LARGEST_EXPONENT)
    axes.set_xscale("log")
    axes.set_xlim(low, max(high, low * 10))
    axes.xaxis.set_major_locator(LogLocator(base=10, numticks=7))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    return low


def sensitivities(facts: RunFacts) -> Figure:
    """Plots Delta per layer as horizontal bars on a logarithmic axis."""
    title = "Sensitivity per layer" if facts.certified else "Sensitivity per layer: NOT certified"
    rows = _rows(facts, "delta")
    values = [_finite(group, "delta") or 0.0 for group in rows]
    positive = [value for value in values if value > 0]
    if not positive:
        return empty_figure(title, "no layer has a sensitivity")
    figure, axes = _figure(title, rows, facts)
    low = _log_axis(axes, positive, room_right=0.22)
    colour = COLOURS.first if facts.certified else COLOURS.second
    for index, value in enumerate(values):
        if value > 0:
            axes.barh(index, value - low, left=low, height=0.62, color=colour)
        note(axes, max(value, low), index, format_number(value, 3), offset=(4, 0), fontsize=FONT_SIZE - 1)
    label_axes(axes, "sensitivity Δ (log scale)")
    return figure


def largest_signal(group: dict[str, Any], facts: RunFacts) -> float | None:
    """Returns B Delta / sqrt(d), the released sum per coordinate if all examples of a batch pull the same way."""
    delta, count = _finite(group, "delta"), _finite(group, "parameters")
    if delta is None or not count:
        return None
    signal = facts.expected_batch_size * delta / math.sqrt(count)
    return signal if math.isfinite(signal) else None


def noise_and_signal(facts: RunFacts) -> Figure:
    """Plots the noise per coordinate of each layer, next to the signal that it hides."""
    title = "Noise and signal per layer"
    rows = [group for group in _rows(facts, "noise_std") if (_finite(group, "noise_std") or 0.0) > 0]
    if not rows:
        return empty_figure(title, "no noise was added")
    noise = [_finite(group, "noise_std") or 0.0 for group in rows]
    measured = any(_finite(group, "signal") is not None for group in rows)
    signal = [_finite(group, "signal") if measured else largest_signal(group, facts) for group in rows]
    shown = [value if value is not None and value > 0 else None for value in signal]
    figure, axes = _figure(title, rows, facts)
    _log_axis(axes, noise + [value for value in shown if value is not None], room_right=0.06)
    for index, (start, end) in enumerate(zip(noise, shown, strict=True)):
        if end is not None:
            axes.plot([start, end], [index, index], color=COLOURS.soft, linewidth=3, zorder=1)
    axes.plot(noise, range(len(rows)), "s", color=COLOURS.second, markersize=6, label="noise, standard deviation")
    points = [(value, index) for index, value in enumerate(shown) if value is not None]
    if points:
        label = "released sum, root mean square" if measured else "largest possible sum, expected batch"
        axes.plot(*zip(*points, strict=True), "o", color=COLOURS.first, markersize=6, label=label)
    label_axes(axes, "per coordinate (log scale)")
    legend(axes, columns=1)
    return figure


def weight_norms(facts: RunFacts) -> Figure:
    """Plots each layer's norm with its bound, and marks the layers that are on the bound."""
    rows = _rows(facts, "weight_norm")
    if not rows:
        return empty_figure("Weight norms", "no weight norms were recorded")
    bounded = [group for group in facts.groups if _finite(group, "max_norm") is not None]
    occupied = sum(group.get("on_boundary") is True for group in bounded)
    title = f"Weight norms: {occupied} of {len(bounded)} layers on their bound" if bounded else "Weight norms, no bound"
    figure, axes = _figure(title, rows, facts)
    norms = [_finite(group, "weight_norm") or 0.0 for group in rows]
    seen: set[str] = set()
    for index, (group, norm) in enumerate(zip(rows, norms, strict=True)):
        held = group.get("on_boundary") is True
        kind = "on the bound" if held else "inside or free"
        colour = COLOURS.first if held else COLOURS.soft
        label = kind if kind not in seen else None
        seen.add(kind)
        axes.barh(index, norm, height=0.62, color=colour, label=label)
        bound = _finite(group, "max_norm")
        if bound is not None:
            label = "maximum norm" if "bound" not in seen else None
            seen.add("bound")
            axes.plot([bound] * 2, [index - 0.42, index + 0.42], color=COLOURS.second, linewidth=2.2, label=label)
        end = max(norm, bound or 0.0)
        note(axes, end, index, format_number(norm, 3), offset=(5, 0), fontsize=FONT_SIZE - 1)
    bounds = [_finite(group, "max_norm") or 0.0 for group in rows]
    axes.set_xlim(0, 1.16 * max(*norms, *bounds, 1e-12))
    label_axes(axes, "norm of the layer")
    legend(axes, columns=3)
    return figure
