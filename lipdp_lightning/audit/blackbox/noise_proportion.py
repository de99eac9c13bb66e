"""Tests whether the noise is in proportion to the bound, by distances between models (paper 002, 3.2 and
appendix C).
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from scipy import stats

from ..findings import Curve, Finding, PlotData, verdict
from .black_box import Checkpoint, Data, HyperParameters, Implementation
from .bound_tests import slope_p_value
from .heuristics import choose_bound, choose_noise

MODELS, STEPS, VALUES = 5, 10, 10
_SIGNIFICANT = 0.01


def pairwise_distances(
    implementation: Implementation, hyper: HyperParameters, start: Checkpoint, data: Data, models: int
) -> list[float]:
    """Returns the distances between all pairs of models that are trained with different seeds of the noise."""
    flats = [implementation.train(data, hyper.but(seed=1 + seed), start).flat() for seed in range(models)]
    return [float((a - b).norm()) for a, b in itertools.combinations(flats, 2)]


def calibration_finding(
    implementation: Implementation, hyper: HyperParameters, alpha: float, *, models: int = MODELS, steps: int = STEPS,
    values: int = VALUES,
) -> Finding:  # fmt: skip
    """Tests the distances of models that differ in their noise alone, over a decade of bounds.

    The claim is violated where the slope is not significantly above zero, or where the noise of plain SGD's first step
    does not follow the claimed distribution (a Kolmogorov-Smirnov test with p <= alpha). Without noise all distances
    must be zero; otherwise the training is random in other ways.
    """
    star = choose_bound(implementation, hyper)
    low = star / 100 if implementation.saturates else star
    bounds = np.linspace(low, 10 * low, values).tolist()
    multiplier = choose_noise(implementation, hyper, low)
    data = implementation.problem.draw(16, 0)
    start = implementation.warmed(hyper.but(bound=low), data)
    setting = hyper.but(steps=steps, noise_multiplier=multiplier)
    cloud, without = [], []
    for bound in bounds:
        cloud += [(bound, d) for d in pairwise_distances(implementation, setting.but(bound=bound), start, data, models)]
        silent = setting.but(bound=bound, noise_multiplier=0.0)
        without += [(bound, d) for d in pairwise_distances(implementation, silent, start, data, 2)]
    x, y = (list(column) for column in zip(*cloud, strict=True))
    p_value, control = slope_p_value(x, y), max(d for _, d in without)
    rising = p_value < _SIGNIFICANT and float(stats.linregress(x, y).slope) > 0
    exponent = _exponent(x, y)
    ks = ks_p_value(implementation, setting.but(bound=low), start, data) if hyper.optimizer == "sgd" else None
    problems = []
    if multiplier == 0 or not rising:
        problems.append("the noise does not grow with the bound")
    if control > 0:
        problems.append(f"models differ by {control:.2g} without any noise")
    if ks is not None and ks <= alpha:
        problems.append("the noise does not have the claimed deviation")
    text = (
        f"C* = {star:g}, sigma* = {multiplier:g}: distances between models go with the bound to the power "
        f"{exponent:.2f} (slope: p = {p_value:.2g}); without noise they are at most {control:.2g}"
    )
    text += "." if ks is None else f"; Kolmogorov-Smirnov against the claimed noise: p = {ks:.2g}."
    if problems:
        text = f"{'; '.join(problems)}. {text}"
    plot = PlotData(
        "Distance between models against the bound", "bound", "distance",
        (
            Curve(f"{implementation.name}, p = {p_value:.2g}", x, y, "points"),
            Curve("no noise", [b for b, _ in without], [d for _, d in without], "points"),
        ),
        "Flat: the noise does not follow the bound.",
    )  # fmt: skip
    numbers = {
        "bound_star": star, "noise_star": multiplier, "exponent": exponent, "slope_p": p_value, "ks_p": ks,
        "largest_distance_without_noise": control, "implementation": implementation.name,
    }  # fmt: skip
    return Finding(
        f"calibration, {hyper.optimizer}", "Is the noise in proportion to the bound?", verdict(bool(problems)), text,
        p_value=p_value if ks is None else ks, alpha=None if ks is None else alpha, values=numbers, plots=(plot,),
    )  # fmt: skip


def _exponent(x: list[float], y: list[float]) -> float:
    """Returns the exponent of the distances as a power of the bound: 1 in proportion, 0 if independent."""
    if min(y) <= 0:
        return 0.0
    return float(stats.linregress(np.log(x), np.log(y)).slope)


def ks_p_value(
    implementation: Implementation, hyper: HyperParameters, start: Checkpoint, data: Data, repeats: int = 16
) -> float | None:
    """Tests the noise itself: B / learning rate times the difference of one SGD step with noise and one without
    (appendix C).
    """
    if implementation.deviations is None:
        return None
    size = len(data[0])
    one = hyper.but(steps=1)
    claimed = implementation.deviations(start, one, size)
    silent = implementation.train(data, one.but(noise_multiplier=0.0), start)
    collected = []
    for seed in range(repeats):
        noisy = implementation.train(data, one.but(seed=101 + seed), start)
        for name, value in noisy.weights.items():
            difference = (value.double() - silent.weights[name].double()).flatten() * size / hyper.learning_rate
            collected.append(difference / claimed[name] if claimed[name] > 0 else difference * math.inf)
    values = torch.nan_to_num(torch.cat(collected), posinf=1e30, neginf=-1e30)
    return float(stats.kstest(values.numpy(), "norm").pvalue)
