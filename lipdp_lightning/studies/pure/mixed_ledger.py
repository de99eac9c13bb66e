"""Ledgers with Laplace noise and private choices beside Gaussian noise, and their epsilon."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, ClassVar

from lipdp_lightning.accounting.accountants import ADD_REMOVE, ADJACENCIES, REPLACE_ONE, solve_group
from lipdp_lightning.accounting.events import LedgerEntry
from lipdp_lightning.accounting.privacy_curves import PldCurve

SUBSAMPLED_LAPLACE = "subsampled_laplace"
LAPLACE = "laplace"
CHOICE = "choice"


class PureEntry(LedgerEntry):
    """`count` releases with Laplace noise, or choices; the sensitivity of a sum is 1 in the l1 norm.

    `laplace` and `subsampled_laplace` are what `gaussian` and `subsampled_gaussian` are, with independent Laplace
    noise, whose multiplier is its scale. `choice`: one of several candidates by a mechanism that is epsilon-DP, with
    epsilon the inverse of the multiplier. The accountants of a run refuse these entries; `mixed_epsilon` accounts for
    them.
    """

    MECHANISMS: ClassVar[tuple[str, ...]] = (SUBSAMPLED_LAPLACE, LAPLACE, CHOICE)
    OF_ALL_EXAMPLES: ClassVar[tuple[str, ...]] = (LAPLACE, CHOICE)


def mixed_epsilon(entries: Iterable[LedgerEntry], delta: float, adjacency: str = ADD_REMOVE) -> float:
    """Returns an upper bound on the epsilon of a ledger for one example, by privacy loss distributions.

    Raises:
        ValueError: if delta or the adjacency is not valid, or the ledger has no bound.
    """
    if not 0 < delta < 1 or adjacency not in ADJACENCIES:
        raise ValueError(f"delta {delta} is not in (0, 1), or {adjacency!r} is unknown. HINT: use delta=1e-6.")
    recorded = [entry for entry in entries if entry.count > 0]
    if not recorded:
        return 0.0
    if any(entry.noise_multiplier == 0 for entry in recorded):
        return math.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # tails that are not used may overflow
        return solve_group(MixedCurve(recorded, adjacency == REPLACE_ONE), 1, delta)


class MixedCurve:
    """The privacy loss distribution of a ledger with Laplace noise or choices, by connect-the-dots of dp-accounting.

    *Laplace noise in many coordinates.* Let p be the density of independent Laplace noise of scale s in every
    coordinate, and p_v that of the same noise around v, where ||v||_1 <= 1. Both p(x) and a p(x - v) are log-concave in
    (x, v), and so is their minimum. By Prekopa's theorem M(v) = integral of min(p, a p_v) is log-concave in v, and the
    hockey-stick divergence H_a(p || p_v) = 1 - M(v) is quasi-convex. Over the l1 ball it is largest at a vertex, where
    v has one coordinate: the pair Lap(0, s) against Lap(1, s) dominates. With groups of parameters, whose differences
    are within l1 balls of their own, the noise in units of each ball gives sum_k ||v_k||_1 / b_k <= sum_k Delta_k /
    b_k, and the same pair dominates at the joint scale 1 / sum_k (Delta_k / b_k): the inverses of Laplace multipliers
    add, as the squares of those do for Gaussian noise.

    *Poisson samples.* H_a((1-q) p + q p_v || p) is q H_c(p_v || p) with c = (a - 1 + q) / q, and H_a(p || (1-q) p + q
    p_v) is (1 - a (1-q)) H_d(p || p_v) with d = a q / (1 - a (1-q)), or zero. Both are largest where H is, so that the
    one-dimensional subsampled pair dominates, and pairs that dominate compose (Zhu, Dong and Wang 2022).

    *Choices.* Whatever is e-DP is dominated by randomised response of that e (Kairouz, Oh and Viswanath 2015).

    *Replace-one.* A replacement is a removal and an addition: a difference of two contributions has twice the norm, and
    a choice twice the epsilon. Without subsampling the noise counts as half of its scale. Ledgers with samples are
    refused.

    Args:
        entries: the ledger; every entry has noise.
        replace: whether a neighbour replaces an example, in place of adding or removing one.
    """

    def __init__(self, entries: Sequence[LedgerEntry], replace: bool) -> None:
        sampled = [entry for entry in entries if entry.sample_rate < 1]
        if replace and sampled:
            raise ValueError(
                f"a ledger with {sampled[0].mechanism} entries beside Laplace noise or choices has no bound here for "
                "replace_one, where a replacement would be a removal and an addition.\n"
                "HINT: use adjacency='add_remove', or entries of sample_rate 1."
            )
        step = _mixed_step(entries)
        parts = [_distribution(entry, 2.0 if replace else 1.0, step) for entry in entries]
        self._distribution = reduce(lambda one, other: one.compose(other), parts)
        self._rounding = PldCurve.ROUNDING_PER_STEP * max(10, sum(entry.count for entry in entries))

    def delta_at(self, epsilon: float) -> float:
        return min(1.0, max(0.0, float(self._distribution.get_delta_for_epsilon(epsilon))) + self._rounding)


def _mixed_step(entries: Sequence[LedgerEntry]) -> float:
    """Returns the step of the grid of losses; a coarser one is looser, and never unsound."""
    largest = max(1 / entry.noise_multiplier for entry in entries)
    spread = math.fsum(entry.count * (entry.sample_rate / entry.noise_multiplier) ** 2 for entry in entries)
    return max(1e-6 * largest, (math.sqrt(spread) + largest + spread) / 100_000)


def _distribution(entry: LedgerEntry, sensitivity: float, step: float) -> Any:
    """Returns the loss distribution of an entry; both directions of add/remove are in it."""
    from dp_accounting.pld import common, privacy_loss_distribution

    options: dict[str, Any] = {"value_discretization_interval": step, "sampling_prob": entry.sample_rate}
    if entry.mechanism == CHOICE:
        epsilon = math.nextafter(sensitivity / entry.noise_multiplier, math.inf)
        pure = common.DifferentialPrivacyParameters(epsilon, 0.0)
        one = privacy_loss_distribution.from_privacy_parameters(pure, value_discretization_interval=step)
    elif entry.mechanism in (LAPLACE, SUBSAMPLED_LAPLACE):
        one = privacy_loss_distribution.from_laplace_mechanism(entry.noise_multiplier, sensitivity, **options)
    else:
        one = privacy_loss_distribution.from_gaussian_mechanism(entry.noise_multiplier, sensitivity, **options)
    return one if entry.count == 1 else one.self_compose(entry.count)
