"""Plots the results of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..extras import is_installed
from ..files import write_bytes_atomically
from .contender_rows import Row, grouped
from .contenders import CONTENDERS, DEFAULT, OURS, REFERENCE
from .step_parts import ORDER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "osD^v<>Pp*X"


def figures_of(rows: Sequence[Row]) -> list[str]:
    """Returns the names of the plots of one network and number of threads for which there is data."""
    if not is_installed("matplotlib") or not any(row.ratio is not None and row.contender != REFERENCE for row in rows):
        return []
    found = {"time": True, "memory": any(row.memory_ratio is not None for row in rows)}
    found["parts"] = any(row.parts for row in rows if row.contender == DEFAULT)
    return [name for name, there in found.items() if there]


def write_figures(out: Path, rows: Sequence[Row]) -> list[Path]:
    """Writes the plots of every network and number of threads, and returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, own in grouped(rows).items():
        for kind in figures_of(own):
            figure = part_figure(own, name, DEFAULT) if kind == "parts" else ratio_figure(own, name, kind)
            written.append(write_png(out / f"{name}-{kind}.png", figure))
    return written


def ratio_figure(rows: Sequence[Row], name_of_rows: str, quantity: str) -> Figure:
    """Plots the time or memory of every contender over that of the reference, against the batch size."""
    import matplotlib

    from ..report.figure_style import COLOURS, label_axes, legend, new_figure

    shown = [row for row in rows if row.contender != REFERENCE]
    names = [n for n in dict.fromkeys([*CONTENDERS, *(r.contender for r in shown)]) if n != REFERENCE]
    title = {"time": "Step time", "memory": "Peak memory"}[quantity]
    figure, axes = new_figure(f"{title} over plain {REFERENCE}: {name_of_rows}", height=3.9)
    colours = matplotlib.colormaps["tab20"]
    for index, name in enumerate(names):
        values = [
            (r.batch_size, r.ratio if quantity == "time" else r.memory_ratio) for r in shown if r.contender == name
        ]
        points = [(batch, value) for batch, value in values if value is not None]
        if points:
            style: dict[str, Any] = {"color": colours(index), "marker": _MARKERS[index % len(_MARKERS)]}
            line = "-" if name in OURS else "--"
            axes.plot(*zip(*points, strict=True), label=name, linestyle=line, markersize=4, linewidth=1.4, **style)
    axes.axhline(1.0, color=COLOURS.muted, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({row.batch_size for row in shown})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    label_axes(axes, "batch size", f"ratio to {REFERENCE}")
    legend(axes, columns=3)
    return figure


def part_figure(rows: Sequence[Row], name_of_rows: str, contender: str) -> Figure:
    """Plots the parts of one contender's step, stacked, against the batch size."""
    import matplotlib

    from ..report.figure_style import label_axes, legend, new_figure

    shown = [row for row in rows if row.contender == contender and row.parts]
    figure, axes = new_figure(f"Parts of a step: {name_of_rows}, {contender}", height=3.4, grid_axis="y")
    floor = [0.0] * len(shown)
    colours = matplotlib.colormaps["tab20"]
    for index, name in enumerate(ORDER):
        shares = [100 * max(0.0, row.parts.get(name, 0.0)) / sum(map(abs, row.parts.values())) for row in shown]
        if any(shares):
            axes.bar(range(len(shown)), shares, bottom=floor, color=colours(index), label=name, width=0.7)
            floor = [low + share for low, share in zip(floor, shares, strict=True)]
    axes.set_xticks(range(len(shown)), [str(row.batch_size) for row in shown])
    label_axes(axes, "batch size", "% of the step")
    legend(axes, columns=3)
    return figure


def write_png(path: Path, figure: Figure) -> Path:
    from ..report.figure_style import figure_to_png

    return write_bytes_atomically(path, figure_to_png(figure, dots_per_inch=110))
