"""Reproduces thesis figure 6.6.5: the private Hosmer-Lemeshow statistic (Algorithm 10) on the Bank data."""

from __future__ import annotations

from lipdp_lightning.studies.reproduce import Cell, Claim, Entry, Options, Output, Row, Rows, number, summarize
from lipdp_lightning.studies.reproduce.drawing import lines, means_against
from lipdp_lightning.studies.reproduce.scored_data import TABLES, scored
from lipdp_lightning.studies.reproduce.thesis_noise import METHODS, THESIS, certified_share, fixed_noise, privacy

LEVELS, GROUPS = 10, 10
PRIVACY = ["certified_epsilon", "claimed_epsilon", "delta", "adjacency"]


def cells(options: Options) -> list[Cell]:
    records = 4000 if options.quick else None
    return [
        {"records": records, "levels": LEVELS, "groups": GROUPS, "epsilon": epsilon, "method": method, "seed": seed}
        for epsilon in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
        for method in METHODS
        for seed in options.seed_range(30, quick=2)
    ]


def run(cell: Cell) -> Row:
    from lipdp_lightning.curves import private_hosmer_lemeshow

    records = None if cell["records"] is None else int(number(cell["records"]))
    data, method, levels = scored("bank", records), str(cell["method"]), int(number(cell["levels"]))
    groups, claimed = int(number(cell["groups"])), number(cell["epsilon"])
    epsilon = claimed * certified_share(method, "hosmer_lemeshow", levels)
    name = "factorization" if method == "factorization" else "laplace"
    noise = fixed_noise(sorted(cell.items(), key=str))
    test = private_hosmer_lemeshow(data.scores, data.labels, epsilon, noise, groups, levels, mechanism=name)
    truth = true_statistic(records, groups, levels)
    return {
        **privacy(method, "hosmer_lemeshow", levels, claimed),
        "evaluated": len(data.scores),
        "statistic_true": truth,
        "statistic": test.statistic,
        "relative_squared_error": (test.statistic / truth - 1) ** 2,
        "p_value_with_noise": test.p_value(499),
        "p_value_ignoring_noise": test.chi_squared_p_value(),
    }


def true_statistic(records: int | None, groups: int, levels: int) -> float:
    """Returns equation 6.5.1 without noise, with groups between quantiles on the same grid."""
    import numpy as np

    from lipdp_lightning.curves import Grid
    from lipdp_lightning.curves.hosmer_lemeshow import group_sums, statistic, thresholds_of
    from lipdp_lightning.curves.reliability import UNIT

    data, grid = scored("bank", records), Grid(0.0, 1.0, levels)
    fractions = np.cumsum(grid.histogram(data.scores)) / len(data.scores)
    return float(statistic(group_sums(data.scores, data.labels, thresholds_of(fractions, grid.edges, groups)) / UNIT))


def table(rows: Rows) -> Rows:
    columns = ["statistic", "relative_squared_error", "p_value_with_noise"]
    return summarize(rows, ["method", *PRIVACY, "statistic_true"], columns)


def finish(rows: Rows, out: Output) -> str:
    drawn = [(method, [row for row in rows if row["method"] == method], "epsilon") for method in METHODS]
    curves = [(method, found, x, "relative_squared_error") for method, found, x in drawn]
    out.figure(lines("Hosmer-Lemeshow, Bank data", "ε claimed", "relative squared error", curves), "error against ε")
    first = next(row for row in rows if row["method"] == THESIS)
    share = number(first["certified_epsilon"]) / number(first["claimed_epsilon"])
    ends = {method: means_against(found, x, "relative_squared_error")[1] for method, found, x in drawn}
    said = "; ".join(f"{method} {means[0]:.3g} to {means[-1]:.3g}" for method, means in ends.items())
    return (
        f"True statistic {number(first['statistic_true']):.1f} on {first['evaluated']} records. Algorithm 10 gives "
        "every number the noise of ε / (L + 9). Its groups are closed at both ends, so a record on a threshold is "
        f"counted twice; with the half-open groups used here, that noise is certified for {share:.3g} of the claimed "
        f"ε. Relative squared error from the smallest to the largest ε: {said}. Noise makes the statistic larger: a "
        "small p-value that ignores it proves nothing, the one that simulates it is in the table."
    )


def spread(rows: Rows) -> str:
    mine = [row for row in rows if row["method"] == THESIS]
    _, means, deviations = means_against(mine, "epsilon", "relative_squared_error")
    ratios = [d / m for m, d in zip(means, deviations, strict=True) if m > 0]
    return f"deviation over mean of the squared error: {min(ratios):.2g} to {max(ratios):.2g}"


ENTRY = Entry(
    name="thesis-6.6.5",
    title="Error of the private Hosmer-Lemeshow statistic, Bank data",
    source="thesis (004), figure 6.6.5, Algorithm 10",
    expected_time="1 min",
    cells=cells,
    run=run,
    finish=finish,
    table=table,
    data=(TABLES["bank"].file,),
    claims=(Claim("variance over several runs", "quite large", spread),),
)
