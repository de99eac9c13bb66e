"""Reproduces thesis figures 6.5.1 to 6.5.3 (ROC curves) and 6.6.4 (their error against epsilon)."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

from lipdp_lightning.bound_text import upper_text
from lipdp_lightning.studies.reproduce import Cell, Claim, Entry, Options, Output, Row, Rows, number, summarize
from lipdp_lightning.studies.reproduce.drawing import lines, means_against
from lipdp_lightning.studies.reproduce.scored_data import TABLES, scored
from lipdp_lightning.studies.reproduce.thesis_noise import (
    FACTORIZATION,
    METHODS,
    THESIS,
    fixed_noise,
    mechanism,
    privacy,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lipdp_lightning.curves import PrivateROC

LEVELS = 10
QUICK_RECORDS = 4000
CELL = ("dataset", "records", "levels", "epsilon", "method", "seed")
PRIVACY = ["certified_epsilon", "claimed_epsilon", "delta", "adjacency"]
ERRORS = ["auc_error", "area_between_p1", "area_between_p2"]


def cells(dataset: str, epsilons: tuple[float, ...], options: Options) -> list[Cell]:
    records = QUICK_RECORDS if options.quick else None
    return [
        {"dataset": dataset, "records": records, "levels": LEVELS, "epsilon": epsilon, "method": method, "seed": seed}
        for epsilon in epsilons
        for method in METHODS
        for seed in options.seed_range(20, quick=2)
    ]


def release(cell: Cell) -> PrivateROC:
    """Returns the private pair of curves of a cell, on the public grid [0, 1] of predicted probabilities."""
    from lipdp_lightning.curves import Grid, private_roc

    levels = int(number(cell["levels"]))
    design = mechanism(str(cell["method"]), "roc", levels, number(cell["epsilon"]))
    data, grid = scored(str(cell["dataset"]), _records(cell)), Grid(0.0, 1.0, levels)
    return private_roc(data.scores, data.labels, grid, design, fixed_noise(sorted(cell.items())))


def truth(cell: Cell) -> PrivateROC:
    """Returns the exact curves on the same grid."""
    import numpy as np

    from lipdp_lightning.curves import Grid, PrivateROC

    levels = int(number(cell["levels"]))
    data, grid = scored(str(cell["dataset"]), _records(cell)), Grid(0.0, 1.0, levels)
    counts = [np.cumsum(grid.histogram(data.scores[chosen])) for chosen in (data.labels, ~data.labels)]
    design = mechanism(str(cell["method"]), "roc", levels, number(cell["epsilon"]))
    return PrivateROC(grid, design, *(count.astype(np.float64) for count in counts))


def _records(cell: Cell) -> int | None:
    return None if cell["records"] is None else int(number(cell["records"]))


def area_between(first: PrivateROC, second: PrivateROC) -> float:
    """Returns the 1-norm of thesis 6.6.5: the area of the symmetric difference of the regions under the two curves."""
    import numpy as np

    x = np.linspace(0, 1, 4001)
    heights = [np.interp(x, c.false_positive_rate[::-1], c.true_positive_rate[::-1]) for c in (first, second)]
    return float(np.mean(np.abs(heights[0] - heights[1])))


def run(cell: Cell) -> Row:
    curve, exact, levels = release(cell), truth(cell), int(number(cell["levels"]))
    data = scored(str(cell["dataset"]), _records(cell))
    smoothed = [curve.smoothed(p, _metric(cell)) for p in (1, 2)]
    area, private = exact.auc(), _area(smoothed[1])
    return {
        **privacy(str(cell["method"]), "roc", levels, number(cell["epsilon"])),
        "instances": data.instances,
        "positive_share": round(data.positive_share, 3),
        "evaluated": len(data.scores),
        "auc_true": area,
        "auc_private": private,
        "auc_error": abs(private - area),
        **{f"area_between_p{p}": area_between(curve, exact) for p, curve in zip((1, 2), smoothed, strict=True)},
    }


def _area(curve: PrivateROC) -> float:
    from lipdp_lightning.curves.roc import area_under_curve

    some_of_both = min(curve.positives[-1], curve.negatives[-1]) > 0
    return area_under_curve(curve.positives, curve.negatives) if some_of_both else 0.5


def _metric(cell: Cell) -> str:
    """Returns the thesis's smoothing if there is a tree; the factorisation is smoothed by pooling."""
    return "points" if cell["method"] == FACTORIZATION else "tree"


def table(rows: Rows) -> Rows:
    return summarize(rows, ["dataset", "evaluated", "method", *PRIVACY, "auc_true"], ["auc_private", *ERRORS])


def of(rows: Rows, method: str) -> list[Row]:
    return [row for row in rows if row["method"] == method]


def mean(rows: Rows, column: str) -> float:
    return sum(number(row[column]) for row in rows) / len(rows)


_PRIVACY_OF_PAIR = (
    "The thesis gives each curve ε/2 and calls the sum 2ε; it is ε, and with the least sound scale the same noise "
    "is certified for {certified:.3g}, where {claimed:.3g} is claimed. "
)


def finish_curve(rows: Rows, out: Output) -> str:
    for method in (THESIS, FACTORIZATION):
        cell = {name: of(rows, method)[0][name] for name in CELL}
        out.figure(_curves(cell), f"ROC curves with the noise of {method}", method)
    first = of(rows, THESIS)[0]
    text = _PRIVACY_OF_PAIR.format(
        certified=number(first["certified_epsilon"]), claimed=number(first["claimed_epsilon"])
    )
    parts = [
        f"{method} {mean(found, 'area_between_p2'):.4f} (p = 2) and {mean(found, 'area_between_p1'):.4f} (p = 1), "
        f"error of its AUC {mean(found, 'auc_error'):.4f}"
        for method, found in ((method, of(rows, method)) for method in METHODS)
    ]
    unit = ""
    if first["dataset"] == "diabetes":
        unit = " A record is an encounter; a patient with k encounters has k times the ε of a row."
    return (
        f"Logistic regression, fitted to a fifth of the {first['instances']} records and evaluated on the other "
        f"{first['evaluated']}; AUC {number(first['auc_true']):.4f}. {text}Area between the true curve and the "
        f"smoothed private one, means over {len(of(rows, THESIS))} releases: {'; '.join(parts)}.{unit}"
    )


def _curves(cell: Cell) -> Figure:
    from lipdp_lightning.report.figure_style import COLOURS, label_axes, legend, new_figure

    curve, exact = release(cell), truth(cell)
    figure, axes = new_figure(f"ROC, {cell['dataset']}, ε = {cell['epsilon']} ({cell['method']})", height=4.4)
    styles = (
        (curve, "released", COLOURS.second, 0.7, "-"),
        (curve.smoothed(1, _metric(cell)), "smoothed, p = 1", COLOURS.soft, 1.6, "-"),
        (curve.smoothed(2, _metric(cell)), "smoothed, p = 2", COLOURS.first, 1.6, "-"),
        (exact, "true", COLOURS.ink, 1.1, "--"),
    )
    for shown, label, colour, width, style in styles:
        x, y = shown.false_positive_rate, shown.true_positive_rate
        axes.plot(x, y, color=colour, linewidth=width, linestyle=style, label=label)
    axes.set_xlim(-0.05, 1.05)
    axes.set_ylim(-0.05, 1.05)
    label_axes(axes, "false positive rate", "true positive rate")
    legend(axes)
    return figure


def finish_error(rows: Rows, out: Output) -> str:
    pairs = itertools.product(METHODS, (1, 2))
    curves = [(f"{method}, p = {p}", of(rows, method), "epsilon", f"area_between_p{p}") for method, p in pairs]
    out.figure(lines("Error of the ROC curve, Bank data", "ε claimed", "area between", curves), "error against ε")
    first = of(rows, THESIS)[0]
    text = _PRIVACY_OF_PAIR.format(
        certified=number(first["certified_epsilon"]), claimed=number(first["claimed_epsilon"])
    )
    ratios = [
        mean(_at(of(rows, THESIS), e), "area_between_p2") / mean(_at(of(rows, FACTORIZATION), e), "area_between_p2")
        for e in sorted({number(row["epsilon"]) for row in rows})
    ]
    return (
        f"{text}At equal claimed ε the factorisation has an error smaller by a factor of {min(ratios):.2g} to "
        f"{max(ratios):.2g}, and its ε is certified as a whole."
    )


def _at(rows: Rows, epsilon: float) -> list[Row]:
    return [row for row in rows if number(row["epsilon"]) == epsilon]


def falling(rows: Rows) -> str:
    _, means, _ = means_against(of(rows, THESIS), "epsilon", "area_between_p2")
    steps = sum(b < a for a, b in itertools.pairwise(means))
    return f"falls in {steps} of {len(means) - 1} steps, from {means[0]:.3g} to {means[-1]:.3g}"


def norms(rows: Rows) -> str:
    ratios = [
        mean(_at(of(rows, THESIS), e), "area_between_p1") / mean(_at(of(rows, THESIS), e), "area_between_p2")
        for e in sorted({number(row["epsilon"]) for row in rows})
    ]
    return f"p = 1 has {min(ratios):.2f} to {max(ratios):.2f} times the error of p = 2"


def closer(rows: Rows) -> str:
    return f"AUC {mean(of(rows, THESIS), 'auc_private'):.3f} with noise, {mean(rows, 'auc_true'):.3f} without"


def _curve(figure: str, dataset: str, epsilon: float, instances: int, share: float, time: str) -> Entry:
    return Entry(
        name=f"thesis-{figure}",
        title=f"ROC curve of a logistic regression, {dataset} data, ε = {epsilon}",
        source=f"thesis (004), figure {figure}, table 6.1",
        expected_time=time,
        cells=partial(cells, dataset, (epsilon,)),
        run=run,
        finish=finish_curve,
        table=table,
        data=(TABLES[dataset].file,),
        claims=(
            Claim("instances", str(instances), lambda rows: str(rows[0]["instances"])),
            Claim("share of positives", str(share), lambda rows: str(rows[0]["positive_share"])),
            Claim("ε of the curves", str(epsilon), _certified),
            Claim("the curve with noise", "a figure: close to the true one once smoothed", closer),
        ),
    )


def _certified(rows: Rows) -> str:
    return f"{upper_text(number(of(rows, THESIS)[0]['certified_epsilon']), 3)} certified for that noise, replace-one"


ENTRIES = (
    _curve("6.5.1", "heart", 0.5, 4328, 0.152, "10 s"),
    _curve("6.5.2", "bank", 0.2, 45211, 0.117, "20 s"),
    _curve("6.5.3", "diabetes", 0.05, 101766, 0.46, "40 s"),
    Entry(
        name="thesis-6.6.4",
        title="Error of private ROC curves against ε, Bank data",
        source="thesis (004), figure 6.6.4",
        expected_time="1 min",
        cells=partial(cells, "bank", (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)),
        run=run,
        finish=finish_error,
        table=table,
        data=(TABLES["bank"].file,),
        claims=(
            Claim("error with increasing ε", "falls", falling),
            Claim("norms of the smoothing", "perform about equally well", norms),
        ),
    ),
)
