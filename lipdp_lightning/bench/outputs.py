"""The results of a comparison as a table, JSON, CSV, Markdown and plots."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .compare import Row
from .contenders import CONTENDERS, DEFAULT, OURS, REFERENCE
from .parts import ORDER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEADERS = (
    "model", "batch", "contender", "step ms", "quartiles", f"time / {REFERENCE}", "quartiles", "peak MB",
    f"memory / {REFERENCE}",
)  # fmt: skip
_MARKERS = "osD^v<>Pp*X"


def cells(row: Row) -> tuple[str, ...]:
    """What a table shows of a row; one without a result says why in place of the step."""
    head = (row.model, str(row.batch_size), row.contender)
    if row.seconds is None or row.seconds_quartiles is None:
        return (*head, row.status, "", "", "", "", "")
    low, high = row.seconds_quartiles
    times = (f"{1e3 * row.seconds:.4g}", f"{1e3 * low:.4g} to {1e3 * high:.4g}")
    peak = f"{row.peak_memory / 1e6:.0f}" if row.peak_memory is not None else ""
    if row.ratio is None or row.ratio_quartiles is None:
        return (*head, *times, "", "", peak, "")
    low, high = row.ratio_quartiles
    memory = f"{row.memory_ratio:.2f}" if row.memory_ratio is not None else ""
    return (*head, *times, f"{row.ratio:.2f}", f"{low:.2f} to {high:.2f}", peak, memory)


def part_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Milliseconds per step of each part, for every row that has them."""
    measured = [row for row in rows if row.parts]
    names = [name for name in ORDER if any(name in row.parts for row in measured)]
    beside = sorted({name for row in measured for name in row.beside})
    headers = ["model", "batch", "contender", *names, *(f"{name}, beside" for name in beside)]
    lines = [
        [
            row.model, str(row.batch_size), row.contender,
            *(f"{1e3 * row.parts.get(name, 0.0):.2f}" for name in names),
            *(f"{1e3 * row.beside.get(name, 0.0):.2f}" for name in beside),
        ]
        for row in measured
    ]  # fmt: skip
    return headers, lines


def printed(rows: Sequence[Row], machine: dict[str, Any]) -> str:
    """For the terminal."""
    from ..report.tables import render_table

    text = [render_table(_HEADERS, [cells(row) for row in rows], title="Steps side by side")]
    headers, lines = part_table(rows)
    if lines:
        text.append(render_table(headers, lines, title="Parts of our step, ms, measured apart from the comparison"))
    text += [f"{row.model}, batch {row.batch_size}, {row.contender}: {row.reason}" for row in rows if row.reason]
    return "\n\n".join(text) + f"\n\n{footnote(machine)}\n"


def footnote(machine: dict[str, Any]) -> str:
    clock = "events of the GPU" if str(machine["device"]).startswith("cuda") else "wall time"
    return (
        f"{clock}, medians and quartiles of interleaved turns, one process for each contender, bound to as many "
        f"processors as it has threads; peak memory above the set-up; device: {machine.get('gpu', machine['device'])}, "
        f"threads: {machine['threads']}, processors: {machine['processors']}, load average before: "
        f"{machine['load']:.1f}, torch {machine['torch']}"
    )


def as_json(rows: Sequence[Row], machine: dict[str, Any], **more: Any) -> str:
    return json.dumps({"machine": machine, **more, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"


def as_csv(rows: Sequence[Row]) -> str:
    """One line per row; quartiles and parts in columns of their own."""
    plain = [f.name for f in fields(Row) if f.name not in ("parts", "beside", "seconds_quartiles", "ratio_quartiles")]
    parts = [name for name in ORDER if any(name in row.parts for row in rows)]
    pairs = [f"{name}_{end}" for name in ("seconds", "ratio") for end in ("low", "high")]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*plain, *pairs, *(f"part {name}" for name in parts)])
    for row in rows:
        ends = [*(row.seconds_quartiles or ("", "")), *(row.ratio_quartiles or ("", ""))]
        writer.writerow([*(getattr(row, name) for name in plain), *ends, *(row.parts.get(name, "") for name in parts)])
    return stream.getvalue()


def markdown_table(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(headers)
    return "\n".join(f"| {' | '.join(line)} |" for line in (headers, rule, *lines)) + "\n"


def pivot(rows: Sequence[Row], model: str, quantity: str) -> tuple[list[str], list[list[str]]]:
    """One line per contender, one column per batch size: ratios of time with quartiles, of memory, or seconds."""
    shown = [row for row in rows if row.model == model]
    sizes = sorted({row.batch_size for row in shown})
    names = list(dict.fromkeys(row.contender for row in shown))
    found = {(row.contender, row.batch_size): _entry(row, quantity) for row in shown}
    lines = [[name, *(found.get((name, size), "") for size in sizes)] for name in names]
    return ["contender", *(str(size) for size in sizes)], lines


def _entry(row: Row, quantity: str) -> str:
    if row.seconds is None:
        return row.status
    if quantity == "seconds":
        return f"{1e3 * row.seconds:.3g} ms"
    if quantity == "memory":
        return "" if row.memory_ratio is None else f"{row.memory_ratio:.2f}"
    if row.ratio is None or row.ratio_quartiles is None:
        return ""
    low, high = row.ratio_quartiles
    return f"{row.ratio:.2f} ({low:.2f} to {high:.2f})"


def as_markdown(rows: Sequence[Row], machine: dict[str, Any], figures: str = "") -> str:
    """A section per model: ratios of time and memory by batch size, and the parts of the default's step."""
    text = []
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        text.append(f"### {model}\n\n{max(row.parameters for row in own):,} parameters.\n")
        for quantity, title in (
            ("time", f"Step time over {REFERENCE}, median and quartiles over the rounds:"),
            ("memory", f"Peak memory above the set-up, over {REFERENCE}:"),
        ):
            text.append(f"{title}\n\n{markdown_table(*pivot(rows, model, quantity))}")
            if model in compared(rows):
                text.append(f"![{quantity} of {model}]({figures}{model}-{quantity}.png)\n")
        headers, lines = part_table([row for row in own if row.contender == DEFAULT])
        if lines:
            title = f"Parts of a step of {DEFAULT} in ms, measured apart from the comparison:"
            if model in compared(rows):
                text.append(f"![parts of a step of {model}]({figures}{model}-parts.png)\n")
            text.append(f"{title}\n\n{markdown_table(headers[1:2] + headers[3:], [n[1:2] + n[3:] for n in lines])}")
        text += [f"* batch {row.batch_size}, {row.contender}: {row.reason}" for row in own if row.reason]
        if any(row.reason for row in own):
            text.append("")
    seconds = [row for row in rows if row.contender == REFERENCE and row.seconds is not None]
    steps = [[row.model, str(row.batch_size), _entry(row, "seconds"), f"{row.peak_memory or 0:,}"] for row in seconds]
    text.append(f"The steps of {REFERENCE} that all refer to:\n")
    text.append(markdown_table(["model", "batch", "step", "peak memory, bytes"], steps))
    return "\n".join([*text, measured_by(machine)])


def measured_by(machine: dict[str, Any]) -> str:
    """The last line of a section of the page."""
    return f"Measured by `{machine['command']}`: {footnote(machine)}.\n"


def ratio_figure(rows: Sequence[Row], model: str, quantity: str) -> Figure:
    """The time or memory of every contender over that of the reference, against the batch size."""
    import matplotlib

    from ..report.figure_style import COLOURS, label_axes, legend, new_figure

    shown = [row for row in rows if row.model == model and row.contender != REFERENCE]
    names = [n for n in dict.fromkeys([*CONTENDERS, *(r.contender for r in shown)]) if n != REFERENCE]
    title = {"time": "Step time", "memory": "Peak memory"}[quantity]
    figure, axes = new_figure(f"{title} over plain {REFERENCE}: {model}", height=3.6)
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
    legend(axes, columns=4)
    return figure


def part_figure(rows: Sequence[Row], model: str, contender: str) -> Figure:
    """The parts of one contender's step, stacked, against the batch size."""
    import matplotlib

    from ..report.figure_style import label_axes, legend, new_figure

    shown = [row for row in rows if row.model == model and row.contender == contender and row.parts]
    figure, axes = new_figure(f"Parts of a step: {model}, {contender}", height=3.4, grid_axis="y")
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


def write_all(out: Path, rows: Sequence[Row], machine: dict[str, Any]) -> list[Path]:
    """bench.json, bench.csv, bench.md, and the plots; their paths."""
    from ..report.atomic import write_atomically

    out.mkdir(parents=True, exist_ok=True)
    contents = {"bench.json": as_json(rows, machine), "bench.csv": as_csv(rows), "bench.md": as_markdown(rows, machine)}
    written = [write_atomically(out / name, text) for name, text in contents.items()]
    return written + write_figures(out, rows)


def write_figures(out: Path, rows: Sequence[Row]) -> list[Path]:
    """For each model on which there are ratios: those of time and of memory, and the parts of the default's step."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for model in compared(rows):
        figures = {f"{model}-{q}": ratio_figure(rows, model, q) for q in ("time", "memory")}
        if any(row.parts for row in rows if row.model == model and row.contender == DEFAULT):
            figures[f"{model}-parts"] = part_figure(rows, model, DEFAULT)
        written += [write_png(out / f"{name}.png", figure) for name, figure in figures.items()]
    return written


def compared(rows: Sequence[Row]) -> list[str]:
    """The models on which a contender has a ratio to the reference."""
    return list(dict.fromkeys(r.model for r in rows if r.ratio is not None and r.contender != REFERENCE))


def write_png(path: Path, figure: Figure) -> Path:
    from ..report.figure_style import figure_to_png

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(figure_to_png(figure, dots_per_inch=110))
    os.replace(temporary, path)
    return path
