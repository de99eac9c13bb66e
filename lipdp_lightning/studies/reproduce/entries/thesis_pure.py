"""Runs thesis (004) section 5.2 with p = 1 and infinity, and its Algorithms 2 and 4, beside Gaussian noise."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from lipdp_lightning.bound_text import upper_text
from lipdp_lightning.studies.reproduce.entry import Cell, Claim, Entry, Options, Row, Rows
from lipdp_lightning.studies.reproduce.output import Output
from lipdp_lightning.studies.reproduce.summary import mean_and_deviation, number, summarize

if TYPE_CHECKING:
    from torch import Tensor

EPSILON, DELTA = 1.0, 1e-5
STEPS = (1, 2, 4, 8, 16, 64, 256)
ROWS, TEST_ROWS = 4000, 4000
METHODS = ("no privacy", "Gaussian", "Laplace", "Frank-Wolfe by permute-and-flip")
# the box: every entry in [-1, 1]; the ball: entries that sum to at most 1 in absolute value, as shares of a count do
DOMAINS, FEATURES = ("box", "ball"), (3, 10, 30, 100)


def cells(options: Options) -> list[Cell]:
    steps = STEPS[:3] if options.quick else STEPS
    features = FEATURES[:2] if options.quick else FEATURES
    noise: list[Cell] = [{"what": "noise", "domain": None, "features": None, "steps": t, "method": m, "seed": None}
                         for t in steps for m in METHODS[1:3]]  # fmt: skip
    trained: list[Cell] = [
        {"what": "training", "domain": domain, "features": d, "steps": t, "method": method, "seed": seed}
        for seed in options.seed_range(10)
        for domain in DOMAINS
        for d in features
        for t in ((1,) if options.quick else (1, 16))
        for method in METHODS
    ]
    return noise + trained


def run(cell: Cell) -> Row:
    steps, method = int(number(cell["steps"])), str(cell["method"])
    private: Row = {"delta": DELTA, "adjacency": "add_remove"}
    multiplier, epsilon = (math.nan, math.inf) if method == "no privacy" else _multiplier(method, steps)
    if cell["what"] == "noise":
        deviation = multiplier * (math.sqrt(2) if method == "Laplace" else 1.0)
        return {
            "multiplier": multiplier,
            "deviation": deviation,
            "accuracy": None,
            "certified_epsilon": epsilon,
            **private,
        }
    accuracy = _trained(str(cell["domain"]), int(number(cell["features"])), steps, method, multiplier,
                        int(number(cell["seed"])))  # fmt: skip
    return {"multiplier": None if math.isnan(multiplier) else multiplier, "deviation": None, "accuracy": accuracy,
            "certified_epsilon": epsilon, **private}  # fmt: skip


@lru_cache
def _multiplier(method: str, steps: int) -> tuple[float, float]:
    """Returns the noise multiplier, or the inverse epsilon of one choice, and the epsilon of all steps at DELTA."""
    from lipdp_lightning.accounting.accountants import epsilon_of
    from lipdp_lightning.accounting.events import GAUSSIAN, LedgerEntry
    from lipdp_lightning.studies.pure.mixed_ledger import CHOICE, LAPLACE, PureEntry, mixed_epsilon

    def spent(multiplier: float) -> float:
        if method == "Gaussian":
            return epsilon_of("pld", [LedgerEntry(GAUSSIAN, multiplier, 1.0, steps)], DELTA).epsilon
        name = LAPLACE if method == "Laplace" else CHOICE
        return mixed_epsilon([PureEntry(name, multiplier, 1.0, steps)], DELTA)

    low, high = 0.1, 1.0
    while spent(high) > EPSILON:
        low, high = high, 2 * high
    while high > low * 1.002:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle) <= EPSILON else (middle, high)
    return high, spent(high)


def _rows(domain: str, features: int, seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Returns made-up rows whose label depends on two features, with a tenth of the labels exchanged."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, features, dtype=torch.float64, generator=generator) * 2 - 1
    y = (x[:, 0] - x[:, 1] > 0).double()
    y = torch.where(torch.rand(count, generator=generator) < 0.1, 1 - y, y)
    return (x if domain == "box" else x / x.abs().sum(1, keepdim=True)), y


def _trained(domain: str, features: int, steps: int, method: str, multiplier: float, seed: int) -> float:
    """Returns the accuracy on new rows of full-batch steps on the logistic loss within an l1 ball, with settings that
    were fixed beforehand.
    """
    import torch
    from torch import nn

    from lipdp_lightning.bounds.losses import BinaryCrossEntropy
    from lipdp_lightning.curves.discrete_noise import NoiseSource
    from lipdp_lightning.studies.pure.absolute_sums import Sizes, absolute_bounds
    from lipdp_lightning.studies.pure.choices import frank_wolfe
    from lipdp_lightning.studies.pure.laplace_noise import laplace_release

    x, y = _rows(domain, features, 2 * seed, ROWS)
    sizes = Sizes(float(features), 1.0) if domain == "box" else Sizes(1.0, 1.0)
    bounds = absolute_bounds(
        nn.Sequential(nn.Linear(features, 1, bias=False).double()), (features,), sizes, BinaryCrossEntropy()
    )
    source = NoiseSource(seed.to_bytes(16, "big"))
    noise = torch.Generator().manual_seed(seed)

    def gradient(weights: Tensor) -> Tensor:
        return x.T @ (torch.sigmoid(x @ weights) - y)

    weights = torch.zeros(features, dtype=torch.float64)
    if method.startswith("Frank"):
        weights = frank_wolfe(gradient, features, 8.0, bounds[0].sizes.largest, steps, 1 / multiplier, source)
    else:
        for _ in range(steps):
            slope = gradient(weights)
            if method == "Laplace":
                slope = laplace_release({"0": [slope]}, bounds, multiplier, source)["0"][0]
            elif method == "Gaussian":
                radius = math.sqrt(features) if domain == "box" else 1.0
                slope = slope + multiplier * radius * torch.randn(features, dtype=torch.float64, generator=noise)
            weights = weights - (4.0 if domain == "box" else 4.0 * features) * slope / ROWS
    test_x, test_y = _rows(domain, features, 2 * seed + 1, TEST_ROWS)
    return float(((test_x @ weights > 0) == (test_y > 0.5)).double().mean())


def _deviation(rows: Rows, method: str, steps: int) -> float:
    return next(
        number(r["deviation"]) for r in rows if (r["what"], r["method"], r["steps"]) == ("noise", method, steps)
    )


def _most_parameters(rows: Rows, steps: int) -> float:
    return (_deviation(rows, "Gaussian", steps) / _deviation(rows, "Laplace", steps)) ** 2


def _accuracy(rows: Rows, domain: str, features: int, steps: int, method: str) -> tuple[float, float]:
    key = ("training", domain, features, steps, method)
    found = [number(r["accuracy"]) for r in rows
             if (r["what"], r["domain"], r["features"], r["steps"], r["method"]) == key]  # fmt: skip
    mean, deviation = mean_and_deviation(found)
    return mean, deviation / math.sqrt(len(found))


def finish(rows: Rows, out: Output) -> str:
    from lipdp_lightning.studies.reproduce.drawing import lines

    noise = [r for r in rows if r["what"] == "noise"]
    steps = sorted({int(number(r["steps"])) for r in noise})
    curves = [(m, [r for r in noise if r["method"] == m], "steps", "deviation") for m in METHODS[1:3]]
    figure = lines("Standard deviation of the noise per unit of sensitivity", "releases", "deviation", curves)
    out.figure(figure, "Laplace noise per unit of l1 sensitivity against Gaussian noise per unit of l2 sensitivity")
    few = ", ".join(f"{_most_parameters(rows, t):.3g} at {t}" for t in steps)
    trained = [r for r in rows if r["what"] == "training"]
    ahead = []
    for domain in dict.fromkeys(str(r["domain"]) for r in trained):
        for features in sorted({int(number(r["features"])) for r in trained}):
            for t in sorted({int(number(r["steps"])) for r in trained}):
                scores = {m: _accuracy(rows, domain, features, t, m) for m in METHODS[1:]}
                best = max(scores, key=lambda m: scores[m][0])
                listed = ", ".join(f"{m} {scores[m][0]:.3f} ± {scores[m][1]:.3f}" for m in scores)
                ahead.append(f"{domain}, {features} features, {t} step(s): {listed}; the best is {best}")
    return (
        f"At epsilon {upper_text(EPSILON)} and delta {DELTA:g}, for add/remove, accounted by PLD: Laplace noise is the "
        f"smaller one as "
        "long as the squared ratio of the l1 to the l2 sensitivity is below "
        f"{few} release(s). That ratio is at most the number of parameters, and 1 where an example moves one "
        f"coordinate. "
        "With more releases Laplace noise loses its advantage, since its losses then add up like those of "
        "Gaussian noise of "
        "larger deviation. Choices depend on the largest entry alone, so that their cost does not grow with the "
        "number of "
        "features. Training (made-up rows, a tenth of the labels exchanged, settings fixed beforehand), best "
        "first:\n\n* " + "\n* ".join(ahead)
    )


def table(rows: Rows) -> Rows:
    by = ["what", "domain", "features", "steps", "method", "certified_epsilon", "delta", "adjacency"]
    noise = [r for r in rows if r["what"] == "noise"]
    trained = [r for r in rows if r["what"] == "training"]
    return [*summarize(noise, by, ["multiplier", "deviation"]), *summarize(trained, by, ["accuracy"])]


ENTRY = Entry(
    name="thesis-5.2-norms",
    title="Laplace noise and private choices beside Gaussian noise",
    source="thesis (004), section 5.2 with p = 1 and infinity, Algorithms 2 and 4",
    expected_time="10 minutes",
    cells=cells,
    run=run,
    finish=finish,
    table=table,
    claims=(
        Claim("the exponential mechanism in optimisation", "an alternative to study (section 7)",
              lambda rows: "measured; see the paragraph"),
    ),
)  # fmt: skip
