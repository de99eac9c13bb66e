"""Computes what the papers' accounting of several layers amounts to.

000 and 004 add noise sigma Delta_k to each of K layers, whose sensitivities are Delta_k, and account for a step as ONE
Gaussian release of multiplier sigma. An example moves all layers at once, each by a part of its noise: the joint
multiplier is sigma / sqrt(K) (docs/guarantee.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lipdp_lightning.accounting.accountants import ADD_REMOVE, PrivacyBound, epsilon_of
from lipdp_lightning.accounting.events import MOST_STEPS, SUBSAMPLED_GAUSSIAN, LedgerEntry
from lipdp_lightning.budget.calibrate import TOLERANCE, Search, check_target, privacy_bound, warn_of_disagreement

LAYERS = 2
# ends and middle of the search spaces of 000, table 3
BATCH_SIZES = (32, 128, 512)
NOISE_MULTIPLIERS = (0.7, 1.0, 2.0, 5.0)
MOST_EPOCHS = 500


@dataclass(frozen=True)
class Reaccounted:
    """The range of true epsilons over the settings that lead to a published one."""

    lowest: float
    highest: float
    settings: int


def as_published(epsilon: float, rows: int, layers: int = LAYERS) -> Reaccounted:
    """Returns the true epsilons at delta = 1/rows of runs to which the papers' accounting assigns `epsilon`.

    Batch size and noise multiplier are taken from the papers' search space; the number of steps is the largest for
    which the RDP accountant, which the papers use, stays at `epsilon`. The truth is by PLD.
    """
    delta, found = 1 / rows, []
    for batch in BATCH_SIZES:
        rate = batch / rows
        for noise in NOISE_MULTIPLIERS:
            try:
                steps = steps_for(epsilon, delta, rate, noise, "rdp")
            except ValueError:  # one step already spends more
                continue
            if rate >= 1 or steps < 1 / rate or steps > MOST_EPOCHS / rate:
                continue  # less than an epoch, or unrealistically long
            release = LedgerEntry(SUBSAMPLED_GAUSSIAN, noise / math.sqrt(layers), rate, steps)
            found.append(epsilon_of("pld", [release], delta).epsilon)
    if not found:
        return Reaccounted(math.nan, math.nan, 0)
    return Reaccounted(min(found), max(found), len(found))


def steps_for(
    epsilon: float,
    delta: float,
    sample_rate: float,
    noise_multiplier: float,
    accountant: str = "pld",
    adjacency: str = ADD_REMOVE,
    max_examples_per_unit: int = 1,
    tolerance: float = TOLERANCE,
) -> int:
    """Returns a number of steps whose certified epsilon is at most ``epsilon``.

    One more step (or, beyond 1/tolerance steps, a fraction `tolerance` of them more) exceeds it.
    """
    check_target(epsilon, tolerance, delta, sample_rate)
    bounds: dict[int, PrivacyBound] = {}

    def bound(x: float) -> PrivacyBound:
        steps = _steps_at(x)
        if steps not in bounds:
            bounds[steps] = privacy_bound(
                noise_multiplier, delta, sample_rate, steps, accountant, adjacency, max_examples_per_unit
            )
        return bounds[steps]

    mu = math.sqrt(2 * math.log(1 / delta) + 2 * epsilon) - math.sqrt(2 * math.log(1 / delta))
    spread = sample_rate * math.sqrt(math.expm1(min(1 / noise_multiplier**2, 100.0)))
    guess = min(max(2 * math.log(mu / spread), 0.0), math.log(MOST_STEPS))
    search = Search(bound, epsilon, (-math.log(MOST_STEPS), 0.0), -guess)
    x = search.run(0.9 * tolerance)
    if search.unreachable:
        raise ValueError(
            f"one step at noise multiplier {noise_multiplier} and sample rate {sample_rate:.3g} already spends more "
            f"than epsilon {epsilon} at delta {delta}.\nHINT: use more noise, a smaller batch, or a larger epsilon."
        )
    if math.isnan(x):
        raise ValueError(
            f"more than {MOST_STEPS} steps stay within epsilon {epsilon}: the noise multiplier "
            f"{noise_multiplier} is far too large for it.\nHINT: calibrate the noise instead."
        )
    steps, bound_there = _steps_at(x), search.answer(x)
    entry = LedgerEntry(SUBSAMPLED_GAUSSIAN, noise_multiplier, sample_rate, steps)
    warn_of_disagreement(bound_there, [entry], delta, adjacency, max_examples_per_unit)
    return steps


def _steps_at(x: float) -> int:
    return max(1, math.floor(math.exp(-x) * (1 + 1e-12)))
