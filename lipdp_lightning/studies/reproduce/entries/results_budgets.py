"""Reproduces accuracy on fixed features at epsilon 1, 2, 4 and 8, and draws it beside what others have published."""

from __future__ import annotations

from typing import Any

from lipdp_lightning.bound_text import upper_text
from lipdp_lightning.studies.reproduce.entries import results
from lipdp_lightning.studies.reproduce.entry import Cell, Claim, Entry, Options, Row, Rows, Value
from lipdp_lightning.studies.reproduce.output import Output
from lipdp_lightning.studies.reproduce.summary import number

EPSILONS = (1.0, 2.0, 4.0, 8.0)
METHODS = (results.UNCLIPPED, results.CLIPPED)
SEEDS = 1
# accuracy in per cent by epsilon, at delta 1e-5 and without other private or public images
PUBLISHED: dict[str, dict[str, dict[float, float]]] = {
    "MNIST": {"DPSUR (accounting disputed)": {1: 97.93, 2: 98.70, 3: 98.88, 4: 98.95}},
    "Fashion-MNIST": {
        "DPSUR (accounting disputed)": {1: 88.38, 2: 89.34, 3: 89.71, 4: 90.18},
        "DPNAS, from the pixels": {3: 88.09},
    },
    "CIFAR-10": {
        "De et al.": {1: 56.8, 2: 65.9, 4: 73.5, 8: 81.4},
        "DPSUR (accounting disputed)": {1: 64.4, 2: 69.4, 3: 70.8, 4: 71.5},
        "DP-RandP, with synthetic images": {1: 72.3},
    },
}


def cells(options: Options) -> list[Cell]:
    short: dict[str, Value] = {"steps": results.QUICK_STEPS} if options.quick else {}
    return [
        {"data": data, "method": method, "epsilon": epsilon, "seed": seed, **short}
        for seed in options.seed_range(SEEDS)
        for method in METHODS
        for data in results.FILES
        for epsilon in EPSILONS
    ]


def run(cell: Cell) -> Row:
    """Trains the configuration of epsilon 3 with another budget; nothing else is chosen anew."""
    return results.train(cell, {"privacy.epsilon": float(number(cell["epsilon"]))})


def curves(rows: Rows) -> dict[str, dict[str, dict[float, float]]]:
    """Returns, by data set and method, the mean accuracy by epsilon, ours before the published ones."""
    found: dict[str, dict[str, dict[float, list[float]]]] = {}
    for row in rows:
        ours = found.setdefault(str(row["data"]), {}).setdefault(f"ours, {row['method']}", {})
        ours.setdefault(number(row["epsilon"]), []).append(number(row["accuracy"]))
    means = {
        data: {name: {e: sum(v) / len(v) for e, v in sorted(by.items())} for name, by in methods.items()}
        for data, methods in found.items()
    }
    return {data: methods | PUBLISHED[data] for data, methods in means.items()}


def finish(rows: Rows, out: Output) -> str:
    drawn = curves(rows)
    if drawn:
        out.figure(draw(drawn), "Test accuracy against epsilon, ours and published, one plot for each data set")
    return (
        "Test accuracy in percent at delta 1e-5, add/remove adjacency, PLD, with the settings of epsilon 3. Steps and "
        "step sizes were not chosen for these budgets, so that a search at each of them may find more."
    )


def draw(found: dict[str, dict[str, dict[float, float]]]) -> Any:
    """Returns a figure of accuracy against epsilon, one plot for each data set."""
    from lipdp_lightning.report.figure_style import COLOURS, WIDTH, label_axes, legend, new_axes_grid

    figure, (axes,) = new_axes_grid(
        "Accuracy against epsilon, delta 1e-5", (1, len(found)), height=3.6, width=WIDTH * 0.8 * len(found)
    )
    names = list(dict.fromkeys(name for methods in found.values() for name in methods))
    labelled: set[str] = set()
    colours = dict(zip(names, (COLOURS.first, COLOURS.second, *(COLOURS.muted,) * len(names)), strict=False))
    marks = dict(zip(names, "os^vDP*X", strict=False))
    for plot, (data, methods) in zip(axes, found.items(), strict=True):
        for name, by in methods.items():
            style = "-" if name.startswith("ours") else ":"
            label = "_nolegend_" if name in labelled else name
            labelled.add(name)
            plot.plot(list(by), list(by.values()), style, color=colours[name], marker=marks[name], label=label)
        label_axes(plot, f"epsilon ({data})", "test accuracy in %" if plot is axes[0] else "")
    legend(axes[0], columns=2)
    return figure


def _ours_at(data: str, epsilon: float) -> Any:
    def accuracy(rows: Rows) -> str:
        return _ours(rows, data, epsilon)

    return accuracy


def _ours(rows: Rows, data: str, epsilon: float) -> str:
    found = curves([row for row in rows if (row["data"], row["epsilon"]) == (data, epsilon)]).get(data, {})
    parts = [f"{name} {by[epsilon]:.2f} %" for name, by in found.items() if name.startswith("ours")]
    return ", ".join(parts) or "not run"


ENTRY = Entry(
    name="results-budgets",
    title="Accuracy on fixed features at epsilon 1, 2, 4 and 8",
    source="the configurations of this repository",
    expected_time="4 hours",
    cells=cells,
    run=run,
    finish=finish,
    claims=[
        Claim(
            f"{data} at epsilon {upper_text(epsilon)}", f"{accuracy} % ({name})", _ours_at(data, epsilon),
        )
        for data, methods in PUBLISHED.items()
        for name, by in methods.items()
        for epsilon, accuracy in by.items()
        if epsilon in EPSILONS
    ],
    data=results.ENTRY.data,
)  # fmt: skip
