"""Reproduces paper 003, figures 1 to 4 and 7 at small size: clipping functions, noise, radii, and curves of
training."""

from __future__ import annotations

import math
from typing import Any

from lipdp_lightning.studies.reproduce.calibrated import (
    CURVE,
    mean_of,
    moments_of,
    numbers_of,
    panels,
    secret_of,
    select,
    trained,
)
from lipdp_lightning.studies.reproduce.entry import Cell, Claim, Entry, Options, Row, Rows
from lipdp_lightning.studies.reproduce.output import Output
from lipdp_lightning.studies.reproduce.summary import number, summarize

CLIPPINGS = ("local", "global", "automatic")
RADIUS = 4.0  # of figure 1
# the three gradients of figure 2, of which one is longer than the radius
GRADIENTS = ((6.0, 2.0), (-1.0, 2.5), (-2.0, -1.0))
SIGMAS, RADII = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0), (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
STEPS, BATCH, DELTA, RATE = 60, 360, 1e-4, 0.5
CURVES = ("no privacy", "local", "global")


# ---- figures 1 and 2: the functions themselves


def function_cells(options: Options) -> list[Cell]:
    return [{"clipping": c, "norm": n / 4} for c in CLIPPINGS for n in range(0, 49, 8 if options.quick else 1)]


def function_run(cell: Cell) -> Row:
    import torch

    from lipdp_lightning.clipping.factors import clip_factors

    norm = number(cell["norm"])
    factor = float(clip_factors(torch.tensor([norm], dtype=torch.float64), RADIUS, str(cell["clipping"]))[0])
    nothing: Row = {"certified_epsilon": None, "delta": None, "adjacency": None}
    return {"factor": factor, "clipped": factor * norm, **nothing}


def function_finish(rows: Rows, out: Output) -> str:
    import torch

    from lipdp_lightning.clipping.factors import clip_factors

    figure, axes = panels(2, f"Clipping functions, R = {RADIUS:g}", height=3.0)
    for clipping in CLIPPINGS:
        own = select(rows, clipping=clipping)
        for place, column in zip(axes, ("factor", "clipped"), strict=True):
            place.plot([number(r["norm"]) for r in own], [number(r[column]) for r in own], label=clipping)
            place.set_xlabel("norm of the gradient", fontsize=8)
            place.set_title(column, fontsize=8)
    axes[0].legend(fontsize=6)
    out.figure(figure, "factors and clipped norms of three clipping functions", "1")
    figure, axes = panels(3, f"Three gradients and their sum, R = {RADIUS:g}", height=3.0)
    gradients = torch.tensor(GRADIENTS, dtype=torch.float64)
    sums = {}
    for place, clipping in zip(axes, ("none", "local", "global"), strict=True):
        norms = gradients.norm(dim=1)
        factors = torch.ones_like(norms) if clipping == "none" else clip_factors(norms, RADIUS, clipping)
        total = (factors[:, None] * gradients).sum(0)
        sums[clipping] = total
        for factor, gradient in zip(factors, gradients, strict=True):
            place.annotate("", tuple((factor * gradient).tolist()), (0, 0), arrowprops={"arrowstyle": "->"})
        place.annotate("", tuple(total.tolist()), (0, 0), arrowprops={"arrowstyle": "->", "color": "C3"})
        place.set_xlim(-4, 7)
        place.set_ylim(-3, 5)
        place.set_title(clipping, fontsize=8)
    out.figure(figure, "three gradients and their sum in red, without clipping and with local and global clipping", "2")

    def turned(clipping: str) -> float:
        cosine = torch.nn.functional.cosine_similarity(sums["none"], sums[clipping], dim=0)
        return math.degrees(math.acos(max(-1.0, min(1.0, float(cosine)))))

    return (
        f"Figure 1: all three functions keep norms at or below R = {RADIUS:g}; the global one drops what is "
        f"longer. Figure 2: of "
        f"three gradients one is longer than R, and the sum turns by {turned('local'):.0f} degrees under local "
        f"clipping and by "
        f"{turned('global'):.0f} degrees under global clipping. Global clipping leaves the direction alone only "
        f"where R is "
        "above every norm, and then local clipping does the same."
    )


# ---- figures 3, 4 and 7: trainings on the digits of scikit-learn


def configuration(clipping: str, sigma: float, radius: float, steps: int, seed: int) -> dict[str, Any]:
    """Returns one training of a hidden layer of 32; sigma 0 has clipping and no guarantee."""
    privacy: dict[str, Any] = {"delta": DELTA, "steps": steps, "batch_size": BATCH, "max_norm": None}
    if clipping == "no privacy":
        privacy |= {"method": "nonprivate", "noise_multiplier": 1.0}
    else:
        privacy |= {"method": "dpsgd_ghost", "clipping": clipping, "clip_norm": radius, "noise_multiplier": sigma}
        privacy |= {"allow_noncertified": True} if sigma == 0 else {}
    layers = {"input_shape": [1, 8, 8], "outputs": 10, "hidden": [32]}
    return {
        "seed_everything": seed,
        "model": {
            "network": {"class_path": "lipdp_lightning.models.MLP", "init_args": layers},
            "loss": "cross_entropy", "input_bound": 1.0, "input_mode": "normalize",
        },
        "data": {"class_path": "data_modules.Digits"},
        "privacy": privacy,
        # the step size is inverse to the radius, so that small radii are not small steps
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": RATE / min(radius, 1.0)}},
        "trainer": {"accelerator": "cpu", "devices": 1},
    }  # fmt: skip


def cells(options: Options) -> list[Cell]:
    steps = 2 if options.quick else STEPS
    settings = [(3, "local", s, 1.0) for s in SIGMAS]
    settings += [(4, c, 1.0, r) for c in ("local", "global") for r in RADII]
    settings += [(7, c, 1.0, 1.0 if c != "global" else 10.0) for c in CURVES]
    chosen = settings[::4] if options.quick else settings
    return [
        {"figure": figure, "clipping": c, "sigma": s, "radius": r, "steps": steps, "seed": seed}
        for seed in options.seed_range(3)
        for figure, c, s, r in chosen
    ]


def run(cell: Cell) -> Row:
    from lipdp_lightning.experiment import prepare

    steps, seed = int(number(cell["steps"])), int(number(cell["seed"]))
    sigma, radius = number(cell["sigma"]), number(cell["radius"])
    prepared = prepare(configuration(str(cell["clipping"]), sigma, radius, steps, seed), secret=secret_of(cell))
    found = trained(prepared, moments_of(steps, 15) if cell["figure"] == 7 else ())
    return {name: value for name, value in found.items() if name != "diagram"} | {
        name: found.get(name) for name in CURVE
    }


def table(rows: Rows) -> list[Row]:
    by = ["figure", "clipping", "sigma", "radius", "certified_epsilon", "delta", "adjacency"]
    return summarize(rows, by, ["accuracy", "nll", "ece"])


def _figure(rows: Rows, name: int) -> list[Row]:
    return [row for row in rows if row["figure"] == name]


def finish(rows: Rows, out: Output) -> str:
    figure, axes = panels(4, "Noise, radius, and curves of training on digits", height=3.0)
    noise = _figure(rows, 3)
    sigmas = sorted({number(r["sigma"]) for r in noise})
    axes[0].plot(sigmas, [mean_of(select(noise, sigma=s), "accuracy") for s in sigmas], "o-")
    axes[0].set_title("figure 3: accuracy against sigma", fontsize=8)
    radii = _figure(rows, 4)
    for clipping in ("local", "global"):
        own = select(radii, clipping=clipping)
        places = sorted({number(r["radius"]) for r in own})
        axes[1].plot(places, [mean_of(select(own, radius=r), "accuracy") for r in places], "o-", label=clipping)
    axes[1].set_xscale("log")
    axes[1].set_title("figure 4: accuracy against R", fontsize=8)
    for clipping in CURVES:
        own = select(_figure(rows, 7), clipping=clipping)
        for place, column in ((axes[2], "curve_nll"), (axes[3], "curve_accuracy")):
            curves = [numbers_of(row[column]) for row in own if row.get(column)]
            if curves:
                means = [sum(values) / len(values) for values in zip(*curves, strict=True)]
                place.plot(numbers_of(own[0]["curve_steps"]), means, label=clipping)
    axes[2].set_title("figure 7: loss", fontsize=8)
    axes[3].set_title("figure 7: accuracy", fontsize=8)
    for place in axes[1:]:
        place.legend(fontsize=6)
    out.figure(figure, "accuracy against noise and radius, and loss and accuracy along training")
    text = ", ".join(f"{100 * mean_of(select(noise, sigma=s), 'accuracy'):.1f} at {s:g}" for s in sigmas)
    ends = []
    for clipping in CURVES:
        own = select(_figure(rows, 7), clipping=clipping)
        if own:
            nll, accuracy, ece = (mean_of(own, column) for column in ("nll", "accuracy", "ece"))
            ends.append(f"{clipping}: loss {nll:.3f}, accuracy {100 * accuracy:.1f} %, ECE {ece:.3f}")
    means = [100 * mean_of(select(noise, sigma=s), "accuracy") for s in sigmas]
    return (
        f"Digits of scikit-learn, a hidden layer of 32, plain SGD, {STEPS} steps of {BATCH} expected rows. Accuracy in "
        f"percent by noise multiplier under local clipping: {text}. Fact 4.1 says that noise does not change the flow; "
        f"here the means differ by {max(means) - min(means):.1f} points over all multipliers, and every multiplier has "
        f"another epsilon. At the end of training, {'; '.join(ends)}. Settings were fixed beforehand; a step has "
        f"a rate "
        f"of {RATE:g} over the smaller of R and 1."
    )


def _range(rows: Rows) -> str:
    found = [100 * number(row["accuracy"]) for row in _figure(rows, 3)]
    return f"{min(found):.1f} to {max(found):.1f} %"


ENTRIES = (
    Entry(
        name="paper-003-figures-1-2", title="Clipping functions", source="003 figures 1 and 2", expected_time="10 s",
        cells=function_cells, run=function_run, finish=function_finish,
    ),
    Entry(
        name="paper-003-figures-3-4-7", title="Noise, radius and curves of training", source="003 figures 3, 4 and 7",
        expected_time="5 minutes", cells=cells, run=run, finish=finish, table=table,
        claims=(Claim("effect of sigma on accuracy (figure 3)", "not sensitive (in words)", _range),),
    ),
)  # fmt: skip
