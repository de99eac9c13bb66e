"""Fits how the cost of a step grows with batch size, depth and parameters: exponents of power laws.

Each series changes one of them. An exponent is the slope of the least-squares line through the logarithms; R^2 says how
much of their variance the line explains. A cost that does not depend on what changes has exponent 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..bench.compare import Cell, Effort, compare
from ..bench.contender_rows import Row
from ..bench.contenders import DEFAULT, REFERENCE
from ..bench.step_parts import ORDER, REST

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_IDLE = 2e-5  # seconds; a part that takes less is dominated by the clock's noise


@dataclass(frozen=True)
class Series:
    """Cells that differ in one quantity, and the amount of it that a row has."""

    name: str
    cells: tuple[tuple[str, int], ...]
    size: Callable[[Row], float]
    unit: str


def _layers(row: Row) -> float:
    return float(row.model.rpartition("x")[2])


SERIES = (
    Series(
        "batch", tuple(("convnet-1.6m", batch) for batch in (64, 128, 256, 512, 1024)),
        lambda row: float(row.batch_size), "examples, ConvNet of 1.6 M parameters",
    ),
    Series(
        "depth", tuple((f"mlp-256x{layers}", 256) for layers in (2, 4, 8, 16)),
        _layers, "dense layers of 256 x 256, batch 256",
    ),
    Series(
        "parameters", tuple((f"mlp-{width}x3", 256) for width in (256, 512, 1024, 2048)),
        lambda row: float(row.parameters), "parameters of three dense layers, batch 256",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Law:
    """The power law seconds = c size^exponent, fitted from ``points`` of (size, seconds)."""

    series: str
    quantity: str
    exponent: float
    r_squared: float
    points: tuple[tuple[float, float], ...]


def fit(series: str, quantity: str, points: Sequence[tuple[float, float]]) -> Law:
    """Fits least squares in the logarithms; it needs two different sizes and positive values."""
    xs, ys = [math.log(size) for size, _ in points], [math.log(value) for _, value in points]
    x_mean, y_mean = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    variance = math.fsum((x - x_mean) ** 2 for x in xs)
    exponent = math.fsum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / variance
    total = math.fsum((y - y_mean) ** 2 for y in ys)
    left = math.fsum((y - y_mean - exponent * (x - x_mean)) ** 2 for x, y in zip(xs, ys, strict=True))
    return Law(series, quantity, exponent, 1 - left / total if total > 1e-12 else 1.0, tuple(points))


def laws_of(series: Series, rows: Sequence[Row]) -> list[Law]:
    """Returns the laws of the steps of both contenders, and of every part of our step that is measurable at
    all sizes.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.seconds is None:
            continue
        name = "step without privacy" if row.contender == REFERENCE else "our step"
        values = {name: row.seconds}
        values |= {f"ours: {part}": row.parts[part] for part in ORDER if part in row.parts and part != REST}
        values |= {f"ours: {part}, beside": seconds for part, seconds in row.beside.items()}
        for quantity, seconds in values.items():
            found.setdefault(quantity, []).append((series.size(row), seconds))
    enough = {name: points for name, points in found.items() if len(points) == len(series.cells)}
    return [fit(series.name, n, ps) for n, ps in enough.items() if min(seconds for _, seconds in ps) > _IDLE]


def measure(effort: Effort, *, device: str, threads: int, say: Callable[[str], None]) -> list[Law]:
    laws = []
    for series in SERIES:
        cells = [Cell(model, batch, (REFERENCE, DEFAULT), threads, memory=False) for model, batch in series.cells]
        laws += laws_of(series, list(compare(cells, effort, device=device, say=say)))
    return laws


HEADERS = ("series", "quantity", "exponent", "R^2", "from", "to", "ms at first", "ms at last")


def lines(laws: Sequence[Law]) -> list[tuple[str, ...]]:
    return [
        (
            law.series, law.quantity, f"{law.exponent:.2f}", f"{law.r_squared:.2f}", f"{law.points[0][0]:.0f}",
            f"{law.points[-1][0]:.0f}", f"{1e3 * law.points[0][1]:.3g}", f"{1e3 * law.points[-1][1]:.3g}",
        )
        for law in laws
    ]  # fmt: skip


def figure_of(laws: Sequence[Law], series: Series) -> Figure:
    """Plots every quantity of a series against its size, both logarithmic."""
    import matplotlib

    from ..report.figure_style import label_axes, legend, new_figure

    figure, axes = new_figure(f"Growth with {series.name}; dashed: parts of our step", height=4.0)
    colours = matplotlib.colormaps["tab20"]
    for index, law in enumerate(law for law in laws if law.series == series.name):
        style: dict[str, Any] = {"color": colours(index), "linestyle": "--" if ":" in law.quantity else "-"}
        label = f"{law.quantity.removeprefix('ours: ')} ({law.exponent:.2f})"
        axes.plot(*zip(*law.points, strict=True), marker="o", markersize=3, linewidth=1.3, label=label, **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    label_axes(axes, series.unit, "seconds per step")
    legend(axes)
    return figure
