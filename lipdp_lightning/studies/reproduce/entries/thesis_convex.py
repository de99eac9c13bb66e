"""Runs thesis (004) Algorithms 5 and 6 on logistic regression: accuracy, and what their printed noise is worth."""

from __future__ import annotations

import math

from lipdp_lightning.bound_text import upper_text
from lipdp_lightning.studies.reproduce.entry import Cell, Claim, Entry, Options, Row, Rows
from lipdp_lightning.studies.reproduce.output import Output
from lipdp_lightning.studies.reproduce.summary import mean_and_deviation, number, summarize

ROWS, FEATURES, DELTA = 4000, 20, 1e-5
STRENGTH, SAMPLE, STEPS, RADIUS = 0.02, 400, 200, 10.0
EPSILONS = (0.1, 0.3, 1.0, 3.0, 10.0)
METHODS = (
    "output perturbation, by PLD",
    "output perturbation, printed noise",
    "noisy SGD, by PLD",
    "noisy SGD, printed noise",
)
NONE = "no privacy"


def cells(options: Options) -> list[Cell]:
    epsilons = EPSILONS[1:3] if options.quick else EPSILONS
    seeds = options.seed_range(10)
    return [{"method": NONE, "epsilon": None, "seed": s} for s in seeds] + [
        {"method": method, "epsilon": e, "seed": s} for method in METHODS for e in epsilons for s in seeds
    ]


def run(cell: Cell) -> Row:
    import torch

    from lipdp_lightning.accounting.accountants import epsilon_of
    from lipdp_lightning.budget.calibrate import calibrate_noise
    from lipdp_lightning.studies import convex_baselines as baselines

    seed, method = int(number(cell["seed"])), str(cell["method"])
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * ROWS, FEATURES, dtype=torch.float64, generator=generator)
    y = (x @ torch.linspace(1, 0, FEATURES).double() + 0.5 * torch.randn(2 * ROWS, generator=generator) > 0).long()
    problem = baselines.logistic_problem(x[:ROWS], y[:ROWS], ROWS, STRENGTH)
    secret = seed.to_bytes(16, "big")
    whole, printed = method.startswith("output"), method.endswith("printed noise")
    rate, steps = (1.0, 1) if whole else (SAMPLE / ROWS, STEPS)
    if method == NONE:
        weights, epsilon = problem.minimum(1e-6), math.inf
    else:
        target = number(cell["epsilon"])
        if printed:
            # the thesis states output perturbation for a replacement, which moves the minimum twice as far
            multiplier = (2 * baselines.printed_output_multiplier(target, DELTA) if whole
                          else baselines.printed_sgd_multiplier(ROWS, STEPS, target, DELTA))  # fmt: skip
        else:
            multiplier = calibrate_noise(target, DELTA, rate, steps)[0]
        entry = baselines.output_entry(multiplier) if whole else baselines.sgd_entry(multiplier, rate, steps)
        epsilon = epsilon_of("pld", [entry], DELTA).epsilon
        weights = (baselines.output_perturbation(problem, multiplier, secret, 1e-6) if whole
                   else baselines.noisy_sgd(problem, multiplier, SAMPLE, STEPS, RADIUS, secret))  # fmt: skip
    right = ((x[ROWS:] @ weights > 0) == (y[ROWS:] == 1)).double().mean()
    return {"accuracy": float(right), "certified_epsilon": epsilon, "delta": DELTA, "adjacency": "add_remove"}


def _mean(rows: Rows, method: str, epsilon: float | None, column: str = "accuracy") -> float:
    found = [number(r[column]) for r in rows if (r["method"], r["epsilon"]) == (method, epsilon)]
    return mean_and_deviation(found)[0]


def finish(rows: Rows, out: Output) -> str:
    from lipdp_lightning.studies.reproduce.drawing import lines

    epsilons = sorted({number(r["epsilon"]) for r in rows if r["epsilon"] is not None})
    curves = [(m, [r for r in rows if r["method"] == m], "certified_epsilon", "accuracy") for m in METHODS]
    figure = lines("Logistic regression", "certified epsilon", "accuracy", curves, "x", _mean(rows, NONE, None))
    out.figure(figure, "accuracy of output perturbation and noisy SGD against their certified epsilon")
    worth = "; ".join(
        f"{m} at a claimed {upper_text(e)}: {_mean(rows, m, e, 'certified_epsilon'):.3g}"
        for m in METHODS[1::2]
        for e in epsilons
    )
    scores = "; ".join(
        f"at {upper_text(e)}: output perturbation {_mean(rows, METHODS[0], e):.3f}, "
        f"noisy SGD {_mean(rows, METHODS[2], e):.3f}"
        for e in epsilons
    )
    return (
        f"Logistic regression on {ROWS} made-up rows of {FEATURES} features in the unit ball, strength {STRENGTH:g}, "
        f"delta {DELTA:g}, add/remove; noisy SGD takes {STEPS} steps of {SAMPLE} expected rows. Without privacy "
        f"{_mean(rows, NONE, None):.3f}. Calibrated by PLD, {scores}. The certified epsilon of the thesis's "
        f"noise: {worth}. "
        "Its noise for SGD has no batch size in it: it is right for one row a step, and too small for more."
    )


def _worth(rows: Rows) -> str:
    return f"{_mean(rows, METHODS[3], 1.0, 'certified_epsilon'):.3g}"


def table(rows: Rows) -> Rows:
    return summarize(rows, ["method", "epsilon", "certified_epsilon", "delta", "adjacency"], ["accuracy"])


ENTRY = Entry(
    name="thesis-algorithms-5-6",
    title="Output perturbation and noisy SGD on a strongly convex problem",
    source="thesis (004), Algorithms 5 and 6, theorems 3.2.1 and 3.2.3",
    expected_time="2 minutes",
    cells=cells,
    run=run,
    finish=finish,
    table=table,
    claims=(Claim("epsilon of noisy SGD with the printed noise, claimed 1", "1", _worth),),
)
