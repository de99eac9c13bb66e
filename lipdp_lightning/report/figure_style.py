"""Defines the look of every plot, and turns a figure into an image or inline SVG.

Figures are made with matplotlib's object interface: nothing is registered with pyplot and no global setting is changed.
A training process may draw them at any time, and they are freed like any other object. matplotlib is an extra, and
imported when the first figure is made.
"""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lipdp_lightning.extras import require
from lipdp_lightning.report.formats import clean_text, format_bound, format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "DARK_COLOURS",
    "empty_figure",
    "figure_to_png",
    "figure_to_svg",
    "new_axes_grid",
    "new_figure",
    "shorten",
]


@dataclass(frozen=True)
class Colours:
    """One colour per role. Blue and vermillion differ for every common form of colour blindness."""

    ink: str
    muted: str
    grid: str
    surface: str
    first: str
    second: str
    soft: str


# A page replaces each value by a CSS variable named after its role, so the values must differ.
COLOURS = Colours(
    ink="#1b2230",
    muted="#5a6478",
    grid="#e4e8ef",
    surface="#fefefe",
    first="#0072b2",
    second="#d55e00",
    soft="#a9cfe6",
)
DARK_COLOURS = Colours(
    ink="#e8ecf4",
    muted="#a3aec2",
    grid="#2f3747",
    surface="#1a202c",
    first="#5cb8ee",
    second="#f59a4c",
    soft="#2f5f80",
)

WIDTH = 4.7  # inches
MOST_TIPS = 60  # points of a curve that a page names under the pointer
POINTS_PER_INCH = 72  # of an SVG
FONT_SIZE = 9.5


def plain(text: Any, value: str | None = None) -> Any:
    """Switches off mathematical markup, so that a dollar sign in a layer's name remains a dollar sign."""
    text.set_parse_math(False)
    if value is not None:
        text.set_text(value)
    return text


def shorten(name: Any, limit: int = 24) -> str:
    """Returns a long module path without its middle."""
    text = "".join(char if char.isprintable() else " " for char in str(name))
    if len(text) <= limit:
        return text
    head = limit // 4
    return f"{text[:head]}…{text[-(limit - head - 1) :]}"


def new_figure(title: str, *, height: float = 3.2, grid_axis: str | None = "both") -> tuple[Figure, Axes]:
    """Returns a figure with one set of axes, in the style of the report."""
    figure, ((axes,),) = new_axes_grid(title, (1, 1), height=height, grid_axis=grid_axis)
    return figure, axes


def new_axes_grid(
    title: str,
    shape: tuple[int, int],
    *,
    height: float,
    width: float = WIDTH,
    height_ratios: tuple[float, ...] | None = None,
    grid_axis: str | None = "both",
    sharex: bool = False,
    sharey: bool = False,
) -> tuple[Figure, list[list[Axes]]]:
    """Returns a figure with rows and columns of axes, in the style of the report."""
    require("matplotlib", "A plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(
        figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06), facecolor=COLOURS.surface
    )
    FigureCanvasAgg(figure)
    head = figure.suptitle(title, x=0.012, ha="left", fontsize=FONT_SIZE + 1.5, fontweight="bold")
    plain(head).set_color(COLOURS.ink)
    grid = figure.subplots(*shape, squeeze=False, height_ratios=height_ratios, sharex=sharex, sharey=sharey)
    for axes in grid.flat:
        _style(axes, grid_axis)
    return figure, grid.tolist()


def _style(axes: Axes, grid_axis: str | None) -> None:
    axes.set_facecolor(COLOURS.surface)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(COLOURS.muted)
        axes.spines[side].set_linewidth(0.8)
    axes.tick_params(colors=COLOURS.muted, labelsize=FONT_SIZE, length=3)
    if grid_axis is not None:
        axes.grid(True, axis=grid_axis, color=COLOURS.grid, linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def label_axes(axes: Axes, x: str, y: str = "") -> None:
    """Sets axis labels in the report's style."""
    plain(axes.set_xlabel(x, fontsize=FONT_SIZE, color=COLOURS.ink))
    if y:
        plain(axes.set_ylabel(y, fontsize=FONT_SIZE, color=COLOURS.ink))


def note(axes: Axes, x: float, y: float, text: str, **options: Any) -> None:
    """Writes a short text at a point, shifted by ``offset`` in points."""
    offset = options.pop("offset", (0, 0))
    style: dict[str, Any] = {"fontsize": FONT_SIZE, "color": COLOURS.ink, "ha": "left", "va": "center"} | options
    plain(axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", **style))


def legend(axes: Axes, *, columns: int = 2) -> None:
    """Adds a legend under the axes, without a frame."""
    box = axes.figure.legend(
        loc="outside lower left", ncols=columns, frameon=False, fontsize=FONT_SIZE, labelcolor=COLOURS.ink
    )
    for text in box.get_texts():
        plain(text)


def empty_figure(title: str, message: str) -> Figure:
    """Returns a figure that says why there is nothing to see."""
    figure, axes = new_figure(title, height=1.8, grid_axis=None)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    centre = axes.text(0.5, 0.5, message, ha="center", va="center", transform=axes.transAxes, wrap=True)
    plain(centre).set(color=COLOURS.muted, fontsize=FONT_SIZE + 1)
    return figure


def figure_to_png(figure: Figure, *, dots_per_inch: int = 150) -> bytes:
    """Returns the figure as a PNG image."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dots_per_inch, facecolor=COLOURS.surface)
    return buffer.getvalue()


def _rewrite_tags(svg: str, rewrite: Callable[[str], str]) -> str:
    # Only tags are rewritten; a layer's name that looks like an attribute or a colour is left alone.
    return re.sub(r"<[^>]*>", lambda match: rewrite(match.group()), svg)


def figure_to_svg(figure: Figure, *, name: str, alt: str) -> str:
    """Returns the figure as inline SVG, without addresses, with identifiers of its own, and with the page's colour
    variables.

    The same figure gives the same text, so the report of unchanged facts does not change.
    """
    import matplotlib

    buffer = io.StringIO()
    # matplotlib reads these two settings from its global table only; the context restores them.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", facecolor=COLOURS.surface, metadata=empty)
    svg = re.sub(r"<!--.*?-->", "", buffer.getvalue(), flags=re.DOTALL)
    svg = svg[svg.index("<svg") :]
    variables = {value: f"var(--plot-{role})" for role, value in vars(COLOURS).items()}
    tips = _tips(figure)

    def rewrite(tag: str) -> str:
        tag = re.sub(r'\sid="', f' id="{name}-', tag)
        tag = re.sub(r'href="#', f'href="#{name}-', tag)
        tag = tag.replace("url(#", f"url(#{name}-")
        for value, variable in variables.items():
            tag = tag.replace(value, variable)
        if tag.startswith("<svg"):
            box = re.search(r'viewBox="([^"]*)"', tag)
            assert box is not None, "matplotlib writes a viewBox"
            named = f' tabindex="0" data-tips="{html.escape(tips)}"' if tips else ""
            return f'<svg class="plot" viewBox="{box.group(1)}" role="img" aria-label="{html.escape(alt)}"{named}>'
        return tag

    return _rewrite_tags(svg, rewrite).strip()


def _tips(figure: Figure) -> str:
    """Returns the places of a plot's points in its SVG and what they stand for, as JSON; "" for other figures."""
    if len(figure.axes) != 1:
        return ""
    (axes,) = figure.axes
    height, scale = figure.get_figheight() * POINTS_PER_INCH, POINTS_PER_INCH / figure.dpi
    found = []
    for line in axes.lines:
        points = np.asarray(line.get_xydata(), dtype=float)
        points = points[np.isfinite(points).all(axis=1)]
        if line.get_transform() != axes.transData or len(points) == 0:
            continue
        chosen = points[np.unique(np.linspace(0, len(points) - 1, MOST_TIPS).round().astype(int))]
        own = str(line.get_label())
        name = axes.get_ylabel() if own.startswith("_") else own  # matplotlib's own labels begin so
        for place, (x, y) in zip(axes.transData.transform(chosen) * scale, chosen, strict=True):
            text = f"{axes.get_xlabel()} {_value(axes.xaxis, x)}, {name} {_value(axes.yaxis, y)}"
            found.append([round(place[0], 1), round(height - place[1], 1), clean_text(text)])
    return json.dumps(found, separators=(",", ":")) if found else ""


def _value(axis: Axis, value: float) -> str:
    """Returns a value as the axis writes it; an epsilon is rounded up."""
    from matplotlib.ticker import FuncFormatter

    if "epsilon" in axis.get_label_text():
        return format_bound(value)
    formatter = axis.get_major_formatter()
    return formatter(float(f"{value:.4g}")) if isinstance(formatter, FuncFormatter) else format_number(float(value))
