"""Entries for the tests of the framework: a few cells that take no time, and ways to fail."""

from __future__ import annotations

import os
import time
from pathlib import Path

from lipdp_lightning.studies.reproduce import Cell, Claim, Entry, Options, Output, Row, Rows, number, summarize


def cells(options: Options) -> list[Cell]:
    return [
        {"method": method, "level": level, "seed": seed}
        for method in ("1e3", "other")  # a name that looks like a number
        for level in (0.1, 2.0)
        for seed in options.seed_range(2)
    ]


def run(cell: Cell) -> Row:
    """Notes in the folder COUNT_CALLS that it was called; fails, dies or waits where a file there says so."""
    folder = Path(os.environ["COUNT_CALLS"])
    name = f"{cell['method']}-{cell['level']}-{cell['seed']}"
    with open(folder / "calls", "a") as stream:
        stream.write(name + "\n")
    if (folder / f"fail-{name}").exists():
        raise RuntimeError("no luck,\nas told")
    if (folder / f"die-{name}").exists():
        os._exit(7)
    if (folder / f"wait-{name}").exists():
        time.sleep(60)
    time.sleep(0.02 * (cell["seed"] == 0))  # so that two workers finish out of order
    private = cell["method"] == "other"
    return {
        "value": 1 / 3 + number(cell["seed"]),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "note": None if private else 'a,"b"',
        "certified_epsilon": number(cell["level"]) if private else float("inf"),
        "delta": 1e-5,
        "adjacency": "add_remove",
    }


def finish(rows: Rows, out: Output) -> str:
    from lipdp_lightning.report.figure_style import new_figure

    figure, axes = new_figure("Values")
    axes.plot([number(row["level"]) for row in rows], [number(row["value"]) for row in rows])
    out.figure(figure, "values against levels")
    return f"There are {len(rows)} rows."


def means(rows: Rows) -> Rows:
    return summarize(rows, ["method", "level", "certified_epsilon", "delta", "adjacency"], ["value"])


def silent(cell: Cell) -> Row:
    return {"value": 1.0}


TINY = Entry(
    "tiny", "A tiny table", "a paper, table 1", "seconds", cells, run, finish,
    claims=[Claim("largest value", "2", lambda rows: f"{max(number(row['value']) for row in rows):.3f}")],
)  # fmt: skip
ENTRIES = (
    TINY,
    Entry("tiny-means", "Means", "a paper, table 2", "seconds", cells, run, finish, table=means),
    Entry("tiny-silent", "No privacy stated", "nowhere", "seconds", cells, silent, finish),
    Entry("tiny-data", "Data", "nowhere", "seconds", cells, run, finish, data=("tabular/a.csv", "tabular/b.csv")),
)
