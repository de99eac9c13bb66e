"""Reproduces paper 003, table 1: the neural tangent kernel under clipping, with rows for this library's scalings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lipdp_lightning.studies.reproduce.entry import Cell, Claim, Entry, Options, Row, Rows, Value
from lipdp_lightning.studies.reproduce.output import Output
from lipdp_lightning.studies.reproduce.summary import number

SEEDS, STEPS, QUICK_STEPS = 10, 400, 20
TOLERANCE = 1e-9  # tolerance on eigenvalues, in units of the largest, in float64
ZERO = 0.1  # share of the first loss, after the same number of steps for every method


def cells(options: Options) -> list[Cell]:
    from lipdp_lightning.studies.dynamics.problems import METHODS

    steps = QUICK_STEPS if options.quick else STEPS
    return [
        {"method": method, "kernel": kernel, "seed": seed, "steps": steps}
        for seed in options.seed_range(SEEDS)
        for method, kernel in METHODS.items()
    ]


def run(cell: Cell) -> Row:
    from lipdp_lightning.studies.dynamics import integrate
    from lipdp_lightning.studies.dynamics.problems import LOSS, make_case

    problem, factors = make_case(str(cell["method"]), int(number(cell["seed"])))
    flow = integrate(problem.network, problem.x, problem.y, LOSS, factors, steps=int(number(cell["steps"])))
    # rows are made up and there is no noise, so nothing about a record is released
    nothing: dict[str, Any] = {"certified_epsilon": None, "delta": None, "adjacency": None}
    return {
        "asymmetry": flow.worst("asymmetry"),
        "smallest_quadratic": flow.worst("quadratic"),
        "smallest_eigenvalue": flow.worst("eigenvalue"),
        "largest_imaginary": flow.worst("imaginary"),
        "slowest_decay": min(moment.rate for moment in flow.moments),
        "largest_loss": max(moment.loss for moment in flow.moments) / flow.moments[0].loss,
        "remaining_loss": flow.remaining,
        "losses": " ".join(f"{m.loss / flow.moments[0].loss:.4g}" for m in flow.moments[:: max(1, STEPS // 60)]),
        **nothing,
    }


COLUMNS: dict[str, Callable[[Row], bool]] = {
    "symmetric": lambda row: number(row["asymmetry"]) <= TOLERANCE,
    "positive in quadratic form": lambda row: number(row["smallest_quadratic"]) >= -TOLERANCE,
    "positive in eigenvalues": lambda row: number(row["smallest_eigenvalue"]) >= -TOLERANCE,
    "monotone loss": lambda row: number(row["slowest_decay"]) >= -TOLERANCE,
    f"loss below {ZERO:.0%} of the first": lambda row: number(row["remaining_loss"]) < ZERO,
}


def table(rows: Rows) -> list[Row]:
    """Returns how many of the problems have each property, along their whole flow."""
    found: list[Row] = []
    for method in dict.fromkeys(str(row["method"]) for row in rows):
        of_method = [row for row in rows if row["method"] == method]
        counts: dict[str, Value] = {
            name: f"{sum(map(holds, of_method))} of {len(of_method)}" for name, holds in COLUMNS.items()
        }
        remaining = sorted(number(row["remaining_loss"]) for row in of_method)
        first = of_method[0]
        found.append(
            {
                "method": method,
                "kernel": first["kernel"],
                **counts,
                "median remaining loss": f"{remaining[len(remaining) // 2]:.2g}",
                "smallest eigenvalue": f"{min(number(r['smallest_eigenvalue']) for r in of_method):.2g}",
                "certified_epsilon": None,
                "delta": None,
                "adjacency": None,
            }
        )
    return found


def finish(rows: Rows, out: Output) -> str:
    from lipdp_lightning.report.figure_style import label_axes, new_figure

    shown = {
        "no clipping": "-",
        "local clipping, small R, flat": "--",
        "global clipping, small R, flat": ":",
        "ours: joint (default)": "-.",
        "ours: layerwise": (0, (3, 1, 1, 1)),
    }
    figure, axes = new_figure("Median loss along the gradient flow", height=3.8)
    for method, style in shown.items():
        curves = [[float(v) for v in str(r["losses"]).split()] for r in rows if r["method"] == method]
        length = max(map(len, curves))
        full = [curve + curve[-1:] * (length - len(curve)) for curve in curves]
        middle = [sorted(values)[len(values) // 2] for values in zip(*full, strict=True)]
        places = [max(1, STEPS // 60) * i for i in range(length)]
        axes.plot(places, middle, linestyle=style, linewidth=1.5, label=method.removesuffix(" (default)"))
    axes.set_yscale("log")
    label_axes(axes, "explicit steps", "loss over first loss")
    axes.legend(fontsize=7)
    out.figure(figure, "median loss of the problems along the flow, for five kinds of factors")
    return (
        f"Networks of two hidden layers of 16 tanh units on {_problems(rows)} made-up regressions of five rows, "
        "whose norms are log-normal with deviation 1.5; full batch, no noise, the flow integrated by explicit steps. "
        "A property counts for a problem if it holds at every step, to 1e-9 of the largest eigenvalue. Counts are "
        "evidence, not proofs: a property that must hold does so in every problem; one that need not may. Small R is "
        "0.3 of the median gradient norm at the start, that of global clipping the median itself. The factors are "
        "those of the library's own code. K is symmetric exactly where all factors of an example's layers and of all "
        "examples agree: without clipping, for `worst_case`, and for `joint` on one layer with rows of one norm. "
        "Global clipping with a radius that drops rows has factors 0 and 1: its kernel is as little symmetric as that "
        "of local clipping, and a dropped row's loss is not lowered. What the paper shows for it holds where nothing "
        "is dropped, and there it is not clipping, of either kind."
    )


def _problems(rows: Rows) -> int:
    return len({row["seed"] for row in rows})


def _ours(*methods: str) -> Callable[[Rows], str]:
    def line(rows: Rows) -> str:
        found = {str(row["method"]): row for row in table(rows)}
        return (
            "; ".join(
                f"{method}: " + ", ".join(str(found[method][name]).split(" of ")[0] for name in COLUMNS)
                for method in methods
            )
            + f" (of {_problems(rows)})"
        )

    return line


_PROPERTIES = "symmetric, quadratic, eigenvalues, monotone, to zero"
ENTRY = Entry(
    name="paper-003-table-1",
    title="Clipping and the neural tangent kernel",
    source="003 table 1",
    expected_time="10 minutes",
    cells=cells,
    run=run,
    finish=finish,
    table=table,
    claims=(
        Claim(f"no clipping: {_PROPERTIES}", "yes, yes, yes, yes, yes", _ours("no clipping")),
        Claim(
            f"large R: {_PROPERTIES}",
            "yes, yes, yes, yes, yes",
            _ours("local clipping, large R", "global clipping, large R"),
        ),
        Claim(
            f"small R, flat: {_PROPERTIES}",
            "no, no, yes, no, yes",
            _ours("local clipping, small R, flat", "global clipping, small R, flat", "automatic clipping, flat"),
        ),
        Claim(
            f"small R, layer-wise: {_PROPERTIES}",
            "no, no, no, no, no",
            _ours("local clipping, small R, layer-wise", "global clipping, small R, layer-wise"),
        ),
        Claim(
            f"ours: {_PROPERTIES}",
            "not in the paper",
            _ours("ours: worst_case", "ours: joint (default)", "ours: layerwise", "ours: exact"),
        ),
    ),
)
