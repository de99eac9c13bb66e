"""Reproduces thesis theorem 6.3.1 and figures 6.6.1 to 6.6.3: errors on the Poisson data of section 6.6.2 (a)."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from lipdp_lightning.studies.reproduce import Cell, Claim, Entry, Options, Output, Row, Rows, number, summarize
from lipdp_lightning.studies.reproduce.drawing import lines, means_against
from lipdp_lightning.studies.reproduce.thesis_noise import METHODS, THESIS, fixed_noise, mechanism, privacy

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PRIVACY = ["certified_epsilon", "claimed_epsilon", "delta", "adjacency"]
EPSILONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
RATIOS = ("tree_p2", "tree_p1", "points_p2", "points_p1")


def counts(cell: Cell) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Returns records per point, and the released noisy counts up to each point, for the cell's data set and noise."""
    import numpy as np

    levels, seed = int(number(cell["levels"])), int(number(cell["seed"]))
    histogram = np.random.default_rng(seed).poisson(number(cell["lambda"]), 1 << levels)
    design = mechanism(str(cell["method"]), "ecdf", levels, number(cell["epsilon"]))
    return histogram, design.release(histogram, fixed_noise(sorted(cell.items())))


def _privacy(cell: Cell) -> Row:
    return privacy(str(cell["method"]), "ecdf", int(number(cell["levels"])), number(cell["epsilon"]))


# ---- theorem 6.3.1


def error_cells(options: Options) -> list[Cell]:
    axes = itertools.product(
        (5, 8) if options.quick else (5, 10, 15), (1.0, 10.0), (0.1, 1.0), METHODS, options.seed_range(10, quick=4)
    )
    names = ("levels", "lambda", "epsilon", "method", "seed")
    return [dict(zip(names, values, strict=True)) for values in axes]


def error_run(cell: Cell) -> Row:
    import numpy as np

    histogram, noisy = counts(cell)
    records, levels, epsilon = int(histogram.sum()), int(number(cell["levels"])), number(cell["epsilon"])
    error = float(np.mean((noisy - np.cumsum(histogram))[:-1] ** 2)) / records**2
    return {
        **_privacy(cell),
        "records": records,
        "squared_error": error,
        "theorem_without_n": 2 * (levels + 1) ** 3 / epsilon**2,
        "over_corrected_theorem": error / (2 * (levels + 1) ** 3 / (records * epsilon) ** 2),
    }


def error_table(rows: Rows) -> Rows:
    return summarize(rows, ["levels", "lambda", "method", *PRIVACY], ["squared_error", "over_corrected_theorem"])


def error_finish(rows: Rows, out: Output) -> str:
    curves = [
        (
            f"{method}, ε = {e}, λ = {m:g}",
            [r for r in rows if (r["method"], r["epsilon"], r["lambda"]) == (method, e, m)],
        )
        for e, m in ((0.1, 1.0), (1.0, 10.0))
        for method in METHODS
    ]
    drawn = [(label, found, "levels", "squared_error") for label, found in curves]
    out.figure(lines("Squared error of F", "levels L", "mean squared error", drawn, "y"), "error against the levels")
    return (
        "The theorem's 2 (L + 1)³ / ε² lacks the factor 1 / n² that its own equation 6.3.2 has; with it, the thesis's "
        f"noise has {_ratio(rows, THESIS)} times the stated error. That noise is certified for L / (L + 1) of the "
        f"claimed ε. At the claimed ε, the least sound scale has {_ratio(rows, 'laplace')} times the thesis's error, "
        f"and the factorisation {_ratio(rows, 'factorization')} times (means over all levels, n and ε)."
    )


def _some(rows: Rows, method: str, epsilon: float, mean: float) -> list[Row]:
    return [row for row in rows if (row["method"], row["epsilon"], row["lambda"]) == (method, epsilon, mean)]


def _ratio(rows: Rows, method: str) -> str:
    found = [number(row["over_corrected_theorem"]) for row in rows if row["method"] == method]
    return f"{sum(found) / len(found):.3g}"


# ---- figures 6.6.1 and 6.6.2


def _smoothing_cells(points: list[tuple[float, float]], options: Options) -> list[Cell]:
    levels = 9 if options.quick else 15
    return [
        {"levels": levels, "lambda": mean, "epsilon": epsilon, "method": THESIS, "seed": seed}
        for mean, epsilon in points
        for seed in options.seed_range(20, quick=3)
    ]


def smoothing_over_epsilon(options: Options) -> list[Cell]:
    return _smoothing_cells([(3.0, epsilon) for epsilon in EPSILONS], options)


def smoothing_over_lambda(options: Options) -> list[Cell]:
    return _smoothing_cells([(mean, 1.0) for mean in (0.01, 0.1, 1.0, 3.0, 10.0, 100.0, 1000.0)], options)


def smoothing_run(cell: Cell) -> Row:
    """Returns the squared 2-norm of the error after smoothing as a share of that before, for each way to smooth."""
    import numpy as np

    from lipdp_lightning.curves import smooth

    histogram, noisy = counts(cell)
    truth, tree = np.cumsum(histogram), (2,) * int(number(cell["levels"]))
    before = float(np.sum((noisy - truth) ** 2))

    def share(name: str) -> float:
        metric, p = name.split("_p")
        fitted = smooth(noisy, int(p), metric, tree, float(truth[-1]))
        return float(np.sum((fitted - truth) ** 2)) / before

    return {**_privacy(cell), "records": int(truth[-1]), **{name: share(name) for name in RATIOS}}


def smoothing_table(rows: Rows) -> Rows:
    return summarize(rows, ["lambda", *PRIVACY], list(RATIOS))


def smoothing_finish(rows: Rows, out: Output) -> str:
    over = "epsilon" if len({row["epsilon"] for row in rows}) > 1 else "lambda"
    symbol, fixed = ("ε", "λ = 3") if over == "epsilon" else ("λ", "ε = 1")
    drawn = [(name.replace("_p", ", p = "), rows, over, name) for name in RATIOS]
    figure = lines(f"Effect of smoothing, {fixed}", symbol, "squared error, after / before", drawn, "x", level=1.0)
    out.figure(figure, f"share of the squared error that smoothing leaves, against {symbol}")
    ends = {name: means_against(rows, over, name)[1] for name in RATIOS}
    said = "; ".join(f"{name}: {values[0]:.3g} to {values[-1]:.3g}" for name, values in ends.items())
    return (
        f"What smoothing leaves of the squared error, from the smallest to the largest {symbol} ({fixed}, "
        f"2^{rows[0]['levels']} points, means over {len({row['seed'] for row in rows})} data sets): {said}. `tree` is "
        "the thesis's problem 6.3.6, `points` the distance over the points. Smoothing is post-processing: the ε is "
        "that of the noise, certified for L / (L + 1) of the thesis's claim."
    )


def below_one(rows: Rows) -> str:
    places, means, _ = means_against(rows, "epsilon", "tree_p2")
    low = [place for place, mean in zip(places, means, strict=True) if mean < 1]
    return f"p = 2 is below 1 at {len(low)} of {len(places)} ε, from ε = {min(low):g}" if low else "nowhere"


def better_norm(rows: Rows) -> str:
    places = sorted({(number(row["lambda"]), number(row["epsilon"])) for row in rows})
    better = [
        place
        for place in places
        if sum(
            number(row["tree_p2"]) - number(row["tree_p1"])
            for row in rows
            if (number(row["lambda"]), number(row["epsilon"])) == place
        )
        < 0
    ]
    return f"p = 2 has less error at {len(better)} of {len(places)} settings"


def large_lambda(rows: Rows) -> str:
    _, means, _ = means_against(rows, "lambda", "tree_p2")
    return f"{means[-1]:.3f} is left at the largest λ, {min(means):.3f} at the best one"


# ---- figure 6.6.3


def inverse_cells(options: Options) -> list[Cell]:
    levels = 9 if options.quick else 15
    return [
        {"levels": levels, "lambda": 3.0, "epsilon": epsilon, "method": method, "seed": seed}
        for epsilon in EPSILONS
        for method in METHODS
        for seed in options.seed_range(10, quick=2)
    ]


def inverse_run(cell: Cell) -> Row:
    """Returns squared errors at 1000 uniform points; those of the inverse are in units of the domain's length."""
    import numpy as np

    from lipdp_lightning.curves import smooth
    from lipdp_lightning.curves.quantiles import crossing

    histogram, noisy = counts(cell)
    truth, levels = np.cumsum(histogram), int(number(cell["levels"]))
    metric = "tree" if cell["method"] != "factorization" else "points"
    fitted = smooth(noisy, 2, metric, (2,) * levels, float(truth[-1]))
    chance = np.random.default_rng(int(number(cell["seed"])))
    points, levels_asked = chance.integers(0, len(truth), 1000), chance.random(1000)
    exact, raw, smoothed = (
        np.array([crossing(curve / truth[-1], p) for p in levels_asked]) for curve in (truth, noisy, fitted)
    )
    return {
        **_privacy(cell),
        "records": int(truth[-1]),
        "error_of_F": float(np.mean(((noisy - truth)[points] / truth[-1]) ** 2)),
        "error_of_inverse": float(np.mean(((raw - exact) / len(truth)) ** 2)),
        "error_of_smoothed_inverse": float(np.mean(((smoothed - exact) / len(truth)) ** 2)),
    }


INVERSE_ERRORS = ("error_of_F", "error_of_inverse", "error_of_smoothed_inverse")


def inverse_table(rows: Rows) -> Rows:
    return summarize(rows, ["method", *PRIVACY], list(INVERSE_ERRORS))


def inverse_finish(rows: Rows, out: Output) -> str:
    drawn = [
        (
            f"{name.removeprefix('error_of_').replace('_', ' ')}, {method}",
            [row for row in rows if row["method"] == method],
            "epsilon",
            name,
        )
        for method in (THESIS, "factorization")
        for name in INVERSE_ERRORS
    ]
    out.figure(lines("F and its inverse, λ = 3", "ε claimed", "mean squared error", drawn), "errors against ε")
    ratios = [number(a["error_of_F"]) / number(b["error_of_F"]) for a, b in _pairs(rows)]
    return (
        f"Mean squared errors at 1000 points, {rows[0]['records']} records or about as many. The factorisation has "
        f"{sum(ratios) / len(ratios):.2g} times less error of F than the thesis's noise at the same claimed ε. The "
        "error of an inverse cannot fall below that of the grid: where a curve moves by less than a record, its "
        "inverse is exact."
    )


def _pairs(rows: Rows) -> list[tuple[Row, Row]]:
    """Returns the averaged rows of the thesis and of the factorisation, at every epsilon."""
    found = {(row["method"], row["claimed_epsilon"]): row for row in inverse_table(rows)}
    return [(found[THESIS, e], found["factorization", e]) for e in EPSILONS]


def same_order(rows: Rows) -> str:
    mine = [row for row in rows if row["method"] == THESIS]
    means = [means_against(mine, "epsilon", name)[1] for name in INVERSE_ERRORS]
    ratios = [max(x) / min(x) for x in zip(*means, strict=True) if min(x) > 0]
    return f"within a factor of {max(ratios):.2g} of each other at every ε where none is 0"


SOURCE = "thesis (004), figure {}, data of 6.6.2 (a)"
ENTRIES = (
    Entry(
        "thesis-theorem-6.3.1", "Error of a private distribution function against n, ε and L",
        "thesis (004), theorem 6.3.1", "20 s", error_cells, error_run, error_finish, table=error_table,
        claims=[Claim(
            "measured / 2 (L + 1)³ / (n ε)² (the theorem without its 1 / n² is off by n²)", "1",
            lambda rows: _ratio(rows, THESIS),
        )],
    ),
    Entry(
        "thesis-6.6.1", "Effect of smoothing against ε, λ = 3", SOURCE.format("6.6.1"), "40 s",
        smoothing_over_epsilon, smoothing_run, smoothing_finish, table=smoothing_table,
        claims=[
            Claim("p = 2 reduces the error", "roughly for ε ≥ 0.2", below_one),
            Claim("p = 2 against p = 1, in the 2-norm", "p = 2 outperforms, especially for small ε", better_norm),
        ],
    ),
    Entry(
        "thesis-6.6.2", "Effect of smoothing against λ, ε = 1", SOURCE.format("6.6.2"), "40 s",
        smoothing_over_lambda, smoothing_run, smoothing_finish, table=smoothing_table,
        claims=[
            Claim("large λ", "smoothing has little effect", large_lambda),
            Claim("p = 2 against p = 1, in the 2-norm", "p = 2 outperforms", better_norm),
        ],
    ),
    Entry(
        "thesis-6.6.3", "Errors of a private distribution function and of its inverse", SOURCE.format("6.6.3"), "40 s",
        inverse_cells, inverse_run, inverse_finish, table=inverse_table,
        claims=[Claim("F, inverse, smoothed inverse", "errors of the same order of magnitude", same_order)],
    ),
)  # fmt: skip
