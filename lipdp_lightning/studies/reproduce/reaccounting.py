"""Computes what the papers' accounting of several layers amounts to.

000 and 004 add noise sigma Delta_k to each of K layers, whose sensitivities are Delta_k, and account for a step as ONE
Gaussian release of multiplier sigma. An example moves all layers at once, each by a part of its noise: the joint
multiplier is sigma / sqrt(K) (docs/guarantee.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    from lipdp_lightning.accounting.accountants import epsilon_of
    from lipdp_lightning.accounting.calibrate import steps_for
    from lipdp_lightning.accounting.events import SUBSAMPLED_GAUSSIAN, LedgerEntry

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
