"""Searches the settings of table 5.4 on validation rows, with the same random trials for every method."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from lipdp_lightning.studies.reproduce.entry import Cell, Entry, Options, Row, Rows
from lipdp_lightning.studies.reproduce.output import Output
from lipdp_lightning.studies.reproduce.tabular import (
    METHODS,
    SETS,
    TabularSet,
    files,
    linear,
    mean,
    settings_text,
    trained,
)

TRIALS = 16
# layer-wise scaling takes the settings of joint scaling, since on one layer they are the same
SEARCHED = tuple(method for method in METHODS if method != "layerwise")
ONE_RELEASE = ("dpsgd", "joint_clip")  # these are one release for a linear model
WITH_ONE_OUTPUT = (*ONE_RELEASE, "joint_saturating")  # and these if it has one output


def drawn(table: TabularSet, trial: int) -> dict[str, Any]:
    """Returns the settings of a trial; every method uses those that it has."""
    dice = random.Random(f"table 5.4, {table.name}, {trial}")
    hidden = [32] if dice.random() < 0.25 else []
    low, high = (0.01, 0.1) if hidden else (0.05, 0.5)
    return {
        "hidden": hidden,
        "bins": dice.choice(table.bins),
        "crosses": dice.choice(table.crosses),
        "rate": dice.choice((1.0, 0.3, 0.1) if table.small else (0.3, 0.1, 0.05)),
        "steps": dice.choice((100, 200)),
        "lr": round(math.exp(dice.uniform(math.log(low), math.log(high))), 4),
        "averaging": dice.random() < 0.5,
        "temperature": dice.choice((1.0, 0.3, 0.1)) if hidden else 1.0,
        "clip": dice.choice((0.1, 0.3, 0.5)),
        "radius": dice.choice((1.0, 3.0, 10.0)),
    }


def cells(options: Options) -> list[Cell]:
    trials = 2 if options.quick else TRIALS
    return [
        {"data": table.name, "method": method, "trial": trial, "settings": settings_text(drawn(table, trial))}
        for table in SETS.values()
        for method in SEARCHED
        for trial in range(trials)
    ]


def run(cell: Cell) -> Row:
    table, method, settings = SETS[str(cell["data"])], str(cell["method"]), json.loads(str(cell["settings"]))
    found = [trained(table, method, settings, 1000 + fold, fold) for fold in range(table.folds)]
    of_folds = " ".join(f"{row['accuracy']:.4f}" for row in found)
    return found[0] | {"accuracy": mean(found), "trainings": len(found), "of_folds": of_folds}


def scores(rows: Rows) -> list[float]:
    """Returns the validation accuracy of each row; if two methods are one release, it is the mean over both."""
    pooled: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        pooled.setdefault(_release(row), []).append(float(row["accuracy"]))  # type: ignore[arg-type]
    return [math.fsum(pooled[_release(row)]) / len(pooled[_release(row)]) for row in rows]


def _release(row: Row) -> tuple[str, str]:
    """Returns the key of a release: table, method and trial; for one release by two methods, table and trial."""
    equal = ONE_RELEASE if SETS[str(row["data"])].outputs > 1 else WITH_ONE_OUTPUT
    same = str(row["method"]) in equal and linear(json.loads(str(row["settings"])))
    return str(row["data"]), f"{' and '.join(equal) if same else row['method']} {row['trial']}"


def best(rows: Rows) -> dict[str, dict[str, Row]]:
    """Returns for each table and method the trial with the highest score."""
    found: dict[str, dict[str, tuple[float, Row]]] = {}
    for row, score in zip(rows, scores(rows), strict=True):
        of_table = found.setdefault(str(row["data"]), {})
        known = of_table.get(str(row["method"]))
        if known is None or score > known[0]:
            of_table[str(row["method"])] = score, row
    return {data: {method: row for method, (_, row) in methods.items()} for data, methods in found.items()}


def as_yaml(chosen: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns one line per method; JSON is YAML."""
    lines = ["# Best validation accuracy of each method among the trials of `lipdp reproduce table_5_4_search`."]
    for data, methods in chosen.items():
        lines += [f"{data}:", *(f"  {method}: {settings_text(settings)}" for method, settings in methods.items())]
    return "\n".join(lines) + "\n"


def finish(rows: Rows, out: Output) -> str:
    from lipdp_lightning.report.atomic import write_atomically

    chosen = {
        data: {method: json.loads(str(row["settings"])) for method, row in methods.items()}
        for data, methods in best(rows).items()
    }
    for methods in chosen.values():
        methods["layerwise"] = methods["joint"]
    write_atomically(out.path(".yaml"), as_yaml(chosen))
    folds = ", ".join(f"{name} {found.folds}" for name, found in SETS.items() if found.folds > 1)
    return (
        f"{len(rows)} trials, the same random settings for every method, judged on a fifth of the training rows; where "
        f"these are few, by the mean over several choices of that fifth ({folds}). DP-SGD and joint scaling with "
        "`loss_clip`, or with a saturating loss of one output, release the same of a linear model: a trial of one is "
        "then judged by the mean over all of them. The test "
        "rows of table 5.4 are not used. The best settings of each method are in "
        f"`{out.path('.yaml').name}`. Every trial is private by itself, with the epsilon of its row; the search as a "
        "whole is not accounted, here as in the papers: on private data it would cost more."
    )


def table(rows: Rows) -> Sequence[Row]:
    return [row for methods in best(rows).values() for row in methods.values()]


ENTRY = Entry(
    name="table_5_4_search",
    title="Settings for table 5.4",
    source="004 table 5.4, 000 tables 1 and 5 (their appendix C.1)",
    expected_time="50 minutes",
    cells=cells,
    run=run,
    finish=finish,
    data=files(),
    table=table,
    version=3,
)
