"""Reproduces thesis figures 6.6.6 (communication of a distributed ROC curve) and 6.6.7 (running time of smoothing)."""

from __future__ import annotations

from lipdp_lightning.studies.reproduce import Cell, Claim, Entry, Options, Output, Row, Rows, number
from lipdp_lightning.studies.reproduce.drawing import lines, means_against

NOTHING: Row = {"certified_epsilon": None, "delta": None, "adjacency": None}
BANK_RECORDS = 45211

# ---- figure 6.6.6

FSS, ROUNDS = "fss", "secure aggregation, a round per threshold"
ONE_ROUND = "secure aggregation, one round"
AXES = {"thresholds": (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000), "servers": (2, 3, 4, 5, 6, 8, 10)}


def traffic_cells(options: Options) -> list[Cell]:
    fixed = {"parties": BANK_RECORDS, "servers": 2, "thresholds": 100, "levels": 12}
    return [
        {"figure": axis, "method": method, **{**fixed, axis: value}}
        for axis, values in AXES.items()
        for value in values
        for method in (FSS, ROUNDS, ONE_ROUND)
        if method != FSS or axis != "servers" or value == 2
    ]


def traffic_run(cell: Cell) -> Row:
    """Returns the bits that everybody sends, from the lengths of messages that are really made, and the thesis's
    formula.
    """
    from lipdp_lightning.studies.parties.costs import modelled_bits
    from lipdp_lightning.studies.parties.simulate import METHODS, measure

    names = ("parties", "servers", "thresholds", "levels")
    numbers = {name: int(number(cell[name])) for name in names}
    method = next(method for method in METHODS if method.name == cell["method"])
    cost = measure(str(cell["figure"]), method, **numbers)
    key = measure(str(cell["figure"]), METHODS[0], **numbers).message_bits
    modelled = modelled_bits(numbers["parties"], numbers["servers"], numbers["thresholds"], key)
    formulas = dict(zip((FSS, ROUNDS), modelled.values(), strict=True))
    return {
        **NOTHING,
        "bits": cost.protocol_bits,
        "message_bits": cost.message_bits,
        "formula_of_6_4_bits": formulas.get(str(cell["method"])),
    }


def _axis(rows: Rows, axis: str, method: str) -> list[Row]:
    return [row for row in rows if (row["figure"], row["method"]) == (axis, method)]


def traffic_finish(rows: Rows, out: Output) -> str:
    for axis, part in (("thresholds", "a"), ("servers", "b")):
        drawn = [(method, _axis(rows, axis, method), axis, "bits") for method in (FSS, ROUNDS, ONE_ROUND)]
        figure = lines(f"Communication by {axis}", axis, "bits sent by all", drawn, "xy" if part == "a" else "y")
        out.figure(figure, f"bits against the number of {axis}", part)
    return (
        f"Bits sent by all of {BANK_RECORDS} parties, two servers, 2^12 points. Nothing is released here: lengths "
        f"depend on public numbers only, whatever ε is. {_crossing(rows)}. The thesis compares with a round of all "
        "parties per threshold; asking for all thresholds in one round makes secure aggregation the cheaper way "
        f"{_one_round(rows)}. Function sharing is run with two servers, which is what there is without keys that grow "
        "exponentially; for more, `lipdp curves simulate` has the thesis's formula."
    )


def _crossing(rows: Rows) -> str:
    pairs = zip(_axis(rows, "thresholds", FSS), _axis(rows, "thresholds", ROUNDS), strict=True)
    cheaper = [int(number(a["thresholds"])) for a, b in pairs if number(a["bits"]) < number(b["bits"])]
    return f"Function sharing sends less than a round per threshold from {min(cheaper)} thresholds on"


def _one_round(rows: Rows) -> str:
    pairs = zip(_axis(rows, "thresholds", FSS), _axis(rows, "thresholds", ONE_ROUND), strict=True)
    cheaper = [int(number(a["thresholds"])) for a, b in pairs if number(b["bits"]) < number(a["bits"])]
    return f"up to {max(cheaper)} of the thresholds tried" if cheaper else "nowhere"


def growth(rows: Rows) -> str:
    fss = [number(row["bits"]) for row in _axis(rows, "thresholds", FSS)]
    rounds = [number(row["bits"]) for row in _axis(rows, "thresholds", ROUNDS)]
    return f"from 1 to 1000 thresholds {fss[-1] / fss[0]:.3g} times for FSS, {rounds[-1] / rounds[0]:.4g} for rounds"


# ---- figure 6.6.7

SOLVERS = ("tree, p = 2", "tree, p = 1", "tree, p = 1, general linear program", "points, p = 2", "points, p = 1")
LARGEST_PROGRAM = 12


def time_cells(options: Options) -> list[Cell]:
    levels = (6, 8, 10) if options.quick else range(6, 18)
    return [
        {"solver": solver, "levels": level, "epsilon": 1.0}
        for solver in SOLVERS
        for level in levels
        if "program" not in solver or level <= (8 if options.quick else LARGEST_PROGRAM)
    ]


def time_run(cell: Cell) -> Row:
    """Returns the least processor time of three runs, on the Poisson data."""
    import time

    import numpy as np

    from lipdp_lightning.curves import Grid, curve_mechanism, smooth
    from lipdp_lightning.curves.smooth import tree_l1_program
    from lipdp_lightning.studies.curve_errors import poisson_values

    levels, solver = int(number(cell["levels"])), str(cell["solver"])
    truth = np.cumsum(Grid(0.0, 1.0, levels).histogram(poisson_values(levels, 3.0))).astype(float)
    design = curve_mechanism("laplace", levels, number(cell["epsilon"]))
    noisy = truth + design.simulate(np.random.default_rng(0), 1)[0]
    times = []
    for _ in range(3):
        start = time.process_time()
        if "program" in solver:
            tree_l1_program(noisy[:-1], design.fan_outs, float(truth[-1]))
        else:
            metric, p = solver.split(", p = ")
            smooth(noisy, int(p), metric, design.fan_outs, float(truth[-1]))
        times.append(time.process_time() - start)
    return {**NOTHING, "points": 1 << levels, "seconds": min(times)}


def time_finish(rows: Rows, out: Output) -> str:
    drawn = [(solver, [row for row in rows if row["solver"] == solver], "points", "seconds") for solver in SOLVERS]
    out.figure(lines("Smoothing: processor time", "points N", "seconds", drawn), "seconds against the number of points")
    largest = {solver: means_against(found, "points", "seconds") for solver, found, _, _ in drawn}
    said = "; ".join(
        f"{solver}: {times[-1]:.3g} s at {places[-1]:.0f}" for solver, (places, times, _) in largest.items()
    )
    return (
        f"Processor time on one core of this machine at the most points tried: {said}. `tree` is problem 6.3.6, solved "
        "exactly for both norms, in near-linear time, as a network between the points' gaps; the general linear "
        "program is what its formulation is without that structure. The thesis shows its times (CVXOPT) as a plot "
        "only. Smoothing uses what was released already."
    )


def quicker(rows: Rows) -> str:
    def last(solver: str) -> Row:
        return [row for row in rows if row["solver"] == solver][-1]

    program = last(SOLVERS[2])
    quadratic = next(r for r in rows if r["solver"] == SOLVERS[0] and r["levels"] == program["levels"])
    ratio = number(program["seconds"]) / number(quadratic["seconds"])
    return f"{ratio:.3g} times at 2^{program['levels']} points, against a general linear program"


ENTRIES = (
    Entry(
        "thesis-6.6.6", "Communication of a distributed ROC curve", "thesis (004), figures 6.6.6 (a) and (b)", "20 s",
        traffic_cells, traffic_run, traffic_finish,
        claims=[
            Claim("growth", "FSS O(n + m|B|), secure aggregation O(n|B|)", growth),
            Claim("large |B|", "FSS is cheaper", _crossing),
        ],
    ),
    Entry(
        "thesis-6.6.7", "Running time of smoothing", "thesis (004), figure 6.6.7", "1 min",
        time_cells, time_run, time_finish,
        claims=[Claim("quadratic against linear program", "the quadratic one is solved more quickly", quicker)],
    ),
)  # fmt: skip
