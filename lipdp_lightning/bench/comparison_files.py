"""Renders the results of a comparison as a table, JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from .comparison_plots import figures_of, write_figures
from .contender_rows import Row, grouped
from .contenders import DEFAULT, REFERENCE
from .networks import network_named
from .step_parts import ORDER

EPOCHS = ("mlp-table",)
"""Networks for which a page shows epochs, since their steps are so short that the time around them counts."""

_HEADERS = (
    "batch", "contender", "step ms", "quartiles", f"time / {REFERENCE}", "quartiles", "epoch s", "peak MB",
    f"peak / {REFERENCE}", "resident MB", f"resident / {REFERENCE}",
)  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    """Returns the cells of a row; one without a result says why in place of the step."""
    head = (str(row.batch_size), row.contender)
    if row.seconds is None or row.seconds_quartiles is None:
        return (*head, row.status, *[""] * (len(_HEADERS) - 3))
    low, high = row.seconds_quartiles
    times = (f"{1e3 * row.seconds:.4g}", f"{1e3 * low:.4g} to {1e3 * high:.4g}")
    ratios = ("", "")
    if row.ratio is not None and row.ratio_quartiles is not None:
        low, high = row.ratio_quartiles
        ratios = (f"{row.ratio:.2f}", f"{low:.2f} to {high:.2f}")
    memory = (row.peak_memory, row.memory_ratio, row.resident_memory, row.resident_ratio)
    shown = ["" if value is None else f"{value:.2f}" for value in memory]
    shown[0::2] = [_megabytes(value) for value in (row.peak_memory, row.resident_memory)]
    return (*head, *times, *ratios, "" if row.epoch_seconds is None else f"{row.epoch_seconds:.3g}", *shown)


def _megabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:.{1 if value < 1e7 else 0}f}"


def part_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Returns milliseconds per step of each part, for every row that has them."""
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
    """Returns the text for the terminal: one table for each network and number of threads."""
    from ..report.tables import render_table

    text = []
    for own in grouped(rows).values():
        title = f"Steps side by side: {own[0].model}, threads: {own[0].threads}"
        text.append(render_table(_HEADERS, [cells(row) for row in own], title=title))
    headers, lines = part_table(rows)
    if lines:
        text.append(render_table(headers, lines, title="Parts of our step, ms, measured apart from the comparison"))
    text += [f"{row.model}, batch {row.batch_size}, {row.contender}: {row.reason}" for row in rows if row.reason]
    return "\n\n".join(text) + f"\n\n{footnote(machine)}\n"


def footnote(machine: dict[str, Any]) -> str:
    clock = "events of the GPU" if str(machine["device"]).startswith("cuda") else "wall time"
    threads = " and ".join(map(str, machine["threads"]))
    return (
        f"{clock}, medians and quartiles of interleaved turns, one process for each contender, bound to as many "
        "processors as it has threads; an epoch is the median step times rows / batch; peak: weights, what is kept "
        "between steps and what steps add, in processes of their own that give back what they free, of all contenders "
        "on the same Poisson samples; resident: the same of the timed processes, whose batches, but for ours, have "
        f"one size; device: {machine.get('gpu', machine['device'])}, threads: {threads}, processors: "
        f"{machine['processors']}, load average before: {machine['load']:.1f}, torch {machine['torch']}"
    )


def as_json(rows: Sequence[Row], machine: dict[str, Any], **more: Any) -> str:
    return json.dumps({"machine": machine, **more, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"


def as_csv(rows: Sequence[Row]) -> str:
    """Returns one line per row, with quartiles and parts in columns of their own."""
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


def pivot(rows: Sequence[Row], quantity: str) -> tuple[list[str], list[list[str]]]:
    """Returns one line per contender and one column per batch size, for the rows of one network."""
    sizes = sorted({row.batch_size for row in rows})
    names = list(dict.fromkeys(row.contender for row in rows))
    found = {(row.contender, row.batch_size): _entry(row, quantity) for row in rows}
    lines = [[name, *(found.get((name, size), "") for size in sizes)] for name in names]
    return ["contender", *(str(size) for size in sizes)], lines


def _entry(row: Row, quantity: str) -> str:
    """Returns for time the ratio with quartiles, for epoch seconds and ratio, for peak and resident the
    ratio and MB.
    """
    if row.seconds is None or row.epoch_seconds is None:
        return row.status
    if quantity in ("peak", "resident"):
        peak = (row.memory_ratio, row.peak_memory)
        ratio, memory = peak if quantity == "peak" else (row.resident_ratio, row.resident_memory)
        return "" if ratio is None else f"{ratio:.2f} ({_megabytes(memory)} MB)"
    if row.ratio is None or row.ratio_quartiles is None:
        return ""
    if quantity == "epoch":
        return f"{row.ratio:.2f} ({row.epoch_seconds:.3g} s)"
    low, high = row.ratio_quartiles
    return f"{row.ratio:.2f} ({low:.2f} to {high:.2f})"


def as_markdown(rows: Sequence[Row], machine: dict[str, Any], figures: str = "") -> str:
    """Returns a section for each network and number of threads, and the steps of the reference."""
    text = [line for name, own in grouped(rows).items() for line in _section(name, own, figures)]
    seconds = [row for row in rows if row.contender == REFERENCE and row.seconds is not None]
    steps = [
        [row.model, str(row.threads), str(row.batch_size), f"{1e3 * (row.seconds or 0):.3g} ms"] for row in seconds
    ]
    text.append(f"The steps of {REFERENCE} that all refer to:\n")
    text.append(markdown_table(["model", "threads", "batch", "step"], steps))
    return "\n".join([*text, measured_by(machine)])


def _section(name: str, rows: list[Row], figures: str) -> list[str]:
    """Returns ratios of time and memory by batch size, and the parts of the default's step."""
    model, threads, plots = rows[0].model, rows[0].threads, figures_of(rows)
    text = [f"### {model}, threads: {threads}\n\n{max(row.parameters for row in rows):,} parameters.\n"]
    titles = {"time": f"Step time over {REFERENCE}, median and quartiles over the rounds:"}
    if model in EPOCHS:
        count = network_named(model).rows
        titles["epoch"] = f"An epoch over {count:,} rows over that of {REFERENCE}, and median step times rows / batch:"
    if any(row.memory_ratio is not None for row in rows):
        titles["peak"] = f"Peak memory over {REFERENCE}, and MB:"
    titles["resident"] = f"Resident memory while steps are timed, over {REFERENCE}, and MB:"
    for quantity, title in titles.items():
        text.append(f"{title}\n\n{markdown_table(*pivot(rows, quantity))}")
        if quantity == "peak":
            text.append(_kept(rows))
        plot = {"time": "time", "peak": "memory"}.get(quantity)
        if plot in plots:
            text.append(f"![{plot} of {name}]({figures}{name}-{plot}.png)\n")
    headers, lines = part_table([row for row in rows if row.contender == DEFAULT])
    if lines:
        if "parts" in plots:
            text.append(f"![parts of a step of {name}]({figures}{name}-parts.png)\n")
        title = f"Parts of a step of {DEFAULT} in ms, measured apart from the comparison:"
        text.append(f"{title}\n\n{markdown_table(headers[1:2] + headers[3:], [n[1:2] + n[3:] for n in lines])}")
    reasons = [f"* batch {row.batch_size}, {row.contender}: {row.reason}" for row in rows if row.reason]
    return text + reasons + ([""] if reasons else [])


def _kept(rows: Sequence[Row]) -> str:
    """Returns the part of the peak that is there before the first step, at the smallest batch."""
    size = min(row.batch_size for row in rows if row.set_up_memory is not None)
    kept = [row for row in rows if row.batch_size == size and row.set_up_memory is not None]
    amounts = ", ".join(f"{row.contender} {_megabytes(row.set_up_memory)} MB" for row in kept)
    return f"Of it before the first step, at batch {size}: {amounts}.\n"


def measured_by(machine: dict[str, Any]) -> str:
    """Returns the last line of a section of the page."""
    return f"Measured by `{machine['command']}`: {footnote(machine)}.\n"


def write_all(out: Path, rows: Sequence[Row], machine: dict[str, Any]) -> list[Path]:
    """Writes bench.json, bench.csv, bench.md and the plots, and returns their paths."""
    from ..report.atomic import write_atomically

    out.mkdir(parents=True, exist_ok=True)
    contents = {"bench.json": as_json(rows, machine), "bench.csv": as_csv(rows), "bench.md": as_markdown(rows, machine)}
    written = [write_atomically(out / name, text) for name, text in contents.items()]
    return written + write_figures(out, rows)
