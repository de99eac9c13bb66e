"""Applies the black-box idea to bounds in place of clipping: additivity of contributions, and noise over depth.

The third such test, of sampling, needs the sampler alone and is in `audit/sampling_checks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..composition import DEPTHS, depth_result
from ..confidence import deviation_bounds
from ..findings import Curve, Finding, PlotData, verdict
from .black_box import Checkpoint, Data, HyperParameters, Implementation, random_data
from .heuristics import BOUNDS

_TOLERANCE = 1e-2


def additivity_finding(implementation: Implementation, hyper: HyperParameters) -> Finding:
    """Tests that the sum of the others' contributions stays the same when a row of zero gradient joins a batch.

    One SGD step without noise changes the weights by -rate / B times the sum. The input of the added row grows from
    tiny to four times the norm of the others; a factor computed from the whole batch changes with it.
    """
    quiet = hyper.but(noise_multiplier=0.0, steps=1, optimizer="sgd")
    x, y = random_data(6, seed=9)
    start = implementation.warmed(quiet.but(bound=max(BOUNDS)), (x, y))
    rate = quiet.learning_rate

    def total(data: Data) -> torch.Tensor:
        after, before = implementation.train(data, quiet, start).flat(), start.flat()
        return (before - after) * len(data[0]) / rate

    direction = x[:1]
    sizes = [0.01, 0.1, 0.5, 1.0, 2.0, 4.0]
    alone, changes = total((x[1:], y[1:])), []
    for size in sizes:
        row = size * direction
        joined = torch.cat([x[1:], row]), torch.cat([y[1:], implementation.resting(start, row, quiet)[1]])
        changes.append(float((total(joined) - alone).norm() / alone.norm().clamp_min(1e-30)))
    factor = max(changes)
    broken = not factor <= _TOLERANCE
    text = f"A row without a gradient changes the sum of the others by up to {100 * factor:.3g} %; " + (
        "contributions depend on the rest of the batch." if broken else "each contribution depends on its own example."
    )
    plot = PlotData(
        "Others' contributions against the norm of a row that joins", "norm / norm of the others", "relative change",
        (Curve(implementation.name, sizes, changes, "points"),), "Zero for a factor of the example alone.", log_x=True,
    )  # fmt: skip
    values = {"sizes": sizes, "changes": changes, "implementation": implementation.name}
    return Finding(
        "additivity", "Does one example's norm change what others contribute?", verdict(broken), text, factor=factor,
        values=values, plots=(plot,),
    )  # fmt: skip


def black_box_depth_finding(
    build: Callable[[int], tuple[Implementation, Data]], hyper: HyperParameters, alpha: float,
    depths: tuple[int, ...] = DEPTHS, repeats: int = 12,
) -> Finding:  # fmt: skip
    """Tests that the shift by one example of large gradient, over the noise of repeated runs, does not grow with depth.

    ``build(depth)`` returns an implementation and that one example. Its effect is measured without noise against the
    same row with a zero gradient; the noise is measured on checkpoints that differ in their seed. Factors are in units
    of 1 / sigma.
    """
    factors: dict[int, float] = {}
    for depth in depths:
        implementation, data = build(depth)
        quiet = hyper.but(noise_multiplier=0.0, steps=1)
        start = implementation.train(data, quiet.but(learning_rate=0.0, optimizer="sgd"), None)
        with_example = implementation.train(data, quiet, start)
        none = implementation.train(implementation.resting(start, data[0], quiet), quiet, start)
        noisy = [implementation.train(data, hyper.but(steps=1, seed=seed), start) for seed in range(2 * repeats)]
        total = 0.0
        for name in start.weights:
            shift = float((with_example.weights[name].double() - none.weights[name].double()).norm())
            total += (shift / _deviation(noisy, name, alpha / len(depths) / len(start.weights))) ** 2 if shift else 0.0
        factors[depth] = math.sqrt(total) * hyper.noise_multiplier
    worst = max(factors.values())
    text = f"{implementation.name}: shift over noise in units of the claim: " + ", ".join(
        f"{f:.3f} at {d} layer(s)" for d, f in factors.items()
    )
    return depth_result(factors, worst, text + ".", alpha)


def _deviation(checkpoints: list[Checkpoint], name: str, alpha: float) -> float:
    """Returns an upper confidence bound from differences of pairs, which cancel everything but the noise."""
    pairs = zip(checkpoints[::2], checkpoints[1::2], strict=True)
    z = torch.cat([(a.weights[name].double() - b.weights[name].double()).flatten() for a, b in pairs]) / math.sqrt(2)
    return max(deviation_bounds(float(z.square().sum()), z.numel(), alpha)[1], 1e-300)
