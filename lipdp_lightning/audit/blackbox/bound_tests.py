"""Tests whether there is a bound at all, and whether it holds for each example (paper 002, 3.1), by changes of the
loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

from ..findings import Curve, Finding, PlotData, verdict
from .black_box import HyperParameters, Implementation, one_example_among_zeros
from .heuristics import BOUNDS, choose_bound, loss_changes

SIZES = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 80, 100)
SLACK = {"sgd": 0.05, "adam": 0.5}  # Adam's step is only nearly linear in the gradient
_INDEPENDENT = 1e-3


def slope_p_value(x: Sequence[float], y: Sequence[float]) -> float:
    """Returns the p-value of the regression t-test for a slope of zero; a constant has p-value 1."""
    values = np.asarray(y, dtype=float)
    if float(np.ptp(values)) <= 1e-9 * max(1e-300, float(np.abs(values).max())):
        return 1.0
    return float(stats.linregress(np.asarray(x, dtype=float), values).pvalue)


def bound_finding(implementation: Implementation, hyper: HyperParameters) -> Finding:
    """Trains one noiseless step on one example for bounds from far below to far above its gradient."""
    data = implementation.problem.draw(1, 3)
    start = implementation.warmed(hyper.but(bound=max(BOUNDS)), data)
    bounds = [10.0**k for k in np.linspace(-3, 3, 13)]
    quiet = hyper.but(noise_multiplier=0.0, steps=1)
    changes = loss_changes(implementation, start, [quiet.but(bound=c) for c in bounds], data)
    largest = max(abs(c) for c in changes)
    spread = (max(changes) - min(changes)) / largest if largest > 0 else 0.0
    p_value = slope_p_value(np.log10(bounds).tolist(), changes)
    broken = spread <= _INDEPENDENT
    text = (
        f"Over bounds from {bounds[0]:g} to {bounds[-1]:g} one step changes the loss by amounts that differ by "
        f"{100 * spread:.3g} % of the largest (slope: p = {p_value:.2g}); "
        + ("the bound has no effect." if broken else "the bound has an effect.")
    )
    plot = PlotData(
        "Change of the loss against the bound", "bound", "change of the loss",
        (Curve(f"{implementation.name}, p = {p_value:.2g}", bounds, changes, "points"),),
        "Constant: nothing bounds an example's gradient.", log_x=True,
    )  # fmt: skip
    values = {"bounds": bounds, "changes": changes, "spread": spread, "implementation": implementation.name}
    return Finding(
        f"bound, {hyper.optimizer}", "Does the bound limit what one example does?", verdict(broken), text,
        p_value=p_value, values=values, plots=(plot,),
    )  # fmt: skip


def per_example_finding(
    implementation: Implementation, hyper: HyperParameters, sizes: Sequence[int] = SIZES
) -> Finding:
    """Tests that the effect of one example among rows of zero gradient falls with the size of the batch.

    The bound is far below the example's gradient over the largest batch (appendix A). Where the aggregate is bounded
    instead, the effect does not depend on the size, and one example has that many times its claimed effect. The p-value
    is the paper's, for the change of that example's loss; the exponent and the factor are measured on the weights.
    """
    far_below = choose_bound(implementation, hyper) / (100 * max(sizes))
    # an effect in proportion to the bound would be lost in the rounding of the weights
    rate = hyper.learning_rate / far_below if hyper.optimizer == "sgd" else hyper.learning_rate
    quiet = hyper.but(noise_multiplier=0.0, steps=1, bound=far_below, learning_rate=rate)
    start = implementation.warmed(hyper.but(bound=max(BOUNDS)), implementation.problem.draw(8, 5))
    changes, moved = [], []
    for size in sizes:
        data = one_example_among_zeros(implementation, start, size, quiet)
        after = implementation.train(data, quiet, start)
        first = data[0][:1], data[1][:1]
        changes.append(implementation.loss(after, first, quiet) - implementation.loss(start, first, quiet))
        none = implementation.train(implementation.resting(start, data[0], quiet), quiet, start)
        moved.append(float((after.flat() - none.flat()).norm()))
    p_value = slope_p_value(np.log(sizes).tolist(), changes)
    exponent = float(stats.linregress(np.log(sizes), np.log(np.maximum(moved, 1e-30))).slope)
    factor = moved[-1] * sizes[-1] / max(moved[0] * sizes[0], 1e-30)
    broken = p_value > 0.01 or exponent > -0.5 or factor > 1 + SLACK[hyper.optimizer]
    text = (
        f"The effect of one example goes with the batch's size to the power {exponent:.2f} (loss: p = {p_value:.2g}); "
        f"at {sizes[-1]} rows it is {factor:.3g} times that of a bound on each example."
    )
    plot = PlotData(
        "Change of the loss against the size of the batch", "rows", "change of the loss",
        (Curve(f"{implementation.name}, p = {p_value:.2g}", list(sizes), changes, "points"),),
        "Constant: the mini-batch's gradient is bounded, and not each example's.",
    )  # fmt: skip
    values = {"sizes": list(sizes), "changes": changes, "exponent": exponent, "implementation": implementation.name}
    return Finding(
        f"per example, {hyper.optimizer}", "Is each example bounded, or their aggregate?", verdict(broken), text,
        factor=factor, p_value=p_value, values=values, plots=(plot,),
    )  # fmt: skip
