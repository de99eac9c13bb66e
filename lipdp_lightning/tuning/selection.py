"""Accounts for private selection: the best of a random number of private trials, with its own guarantee.

Papernot & Steinke, Hyperparameter Tuning with Renyi Differential Privacy (2022), Theorem 2: let Q be (a, e)-RDP and (b,
f)-RDP, with outputs that a score orders. Draw K from the truncated negative binomial distribution D(eta, gamma), run Q
independently K times, and release the best output alone. That is (a, e')-RDP with

    e' = e + (1 + eta) (1 - 1/b) f + (1 + eta) log(1/gamma) / b + log(E K) / (a - 1).

eta = 1 is the geometric distribution (Liu & Talwar 2019), eta = 0 the logarithmic one. Q includes the draw of the
settings, which must not depend on the data or on other trials, and the score. K, the other outputs and their scores
stay secret; K must not depend on the results of trials, so that nothing is stopped early.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..accounting.accountants import solve_group
from ..accounting.events import GAUSSIAN, LedgerEntry
from ..accounting.privacy_curves import AccountantFailure, RdpCurve, collect
from ..key_streams import CounterStream

NAMES = {"geometric": 1.0, "logarithmic": 0.0}
MOST_TRIALS = 1e6
_FLAT = 1e-9  # a smaller eta counts as the logarithmic distribution


@dataclass(frozen=True)
class TrialCount:
    """The truncated negative binomial distribution D(eta, gamma) on 1, 2, 3, ..."""

    eta: float
    gamma: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.eta) and self.eta > -1 and 0 < self.gamma < 1):
            raise ValueError(
                f"eta {self.eta} and gamma {self.gamma} make no distribution. "
                "HINT: use an eta above -1, and a gamma in (0, 1)."
            )

    @classmethod
    def with_mean(cls, eta: float, mean: float) -> TrialCount:
        """Returns the distribution of that eta whose mean number of trials is at least ``mean``, and hardly more."""
        if not 1 < mean <= MOST_TRIALS:
            raise ValueError(
                f"a mean of {mean} trials is not above 1 and at most {MOST_TRIALS:g}. HINT: use --trials 10."
            )
        low, high = -600.0, -1e-12  # bounds on log gamma, over which the mean falls from far above the limit to 1
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if cls(eta, math.exp(middle)).mean() > mean else (low, middle)
        return cls(eta, math.exp(low))

    def mean(self) -> float:
        if abs(self.eta) < _FLAT:
            return (1 / self.gamma - 1) / math.log(1 / self.gamma)
        return self.eta * (1 - self.gamma) / (self.gamma * -math.expm1(self.eta * math.log(self.gamma)))

    def first(self) -> float:
        """Returns P[K = 1]."""
        if abs(self.eta) < _FLAT:
            return (1 - self.gamma) / math.log(1 / self.gamma)
        return self.eta * (1 - self.gamma) / math.expm1(-self.eta * math.log(self.gamma))

    def probabilities(self, largest: int) -> npt.NDArray[np.float64]:
        """Returns P[K = 1], ..., P[K = largest]; each is (1 - gamma) (k + eta) / (k + 1) times the one before."""
        k = np.arange(1, largest, dtype=np.float64)
        ratios = (1 - self.gamma) * (k + self.eta) / (k + 1)
        return self.first() * np.concatenate([np.ones(1), np.cumprod(ratios)])

    def draw(self, stream: CounterStream) -> int:
        """Draws a number of trials, by inversion of a uniform number of 53 bits."""
        left = (float(stream.uint64(1)[0] >> np.uint64(11)) + 0.5) * 2.0**-53
        k, probability = 1, self.first()
        while left > probability and k < 10 * MOST_TRIALS:
            left -= probability
            probability *= (1 - self.gamma) * (k + self.eta) / (k + 1)
            k += 1
        return k


class SelectionCurve(RdpCurve):
    """The guarantee of the best of K trials, from the largest Renyi divergence of any trial, order by order."""

    def __init__(self, trials: Sequence[Sequence[LedgerEntry]], count: TrialCount) -> None:
        super().__init__(())
        each = np.stack([RdpCurve(collect(entries)).divergences for entries in trials])
        self.divergences = selected_divergences(self.orders, each.max(axis=0), count)
        if not np.isfinite(self.divergences).any():
            raise AccountantFailure("no Renyi divergence could be computed")


def selected_divergences(
    orders: npt.NDArray[np.float64], divergences: npt.NDArray[np.float64], count: TrialCount
) -> npt.NDArray[np.float64]:
    """Returns the theorem's e' at every order; the second order b is the best one for it, 1 included."""
    penalty = (1 + count.eta) * math.log(1 / count.gamma)
    usable = np.isfinite(divergences)
    second = (1 + count.eta) * (1 - 1 / orders[usable]) * divergences[usable] + penalty / orders[usable]
    extra = min(float(second.min()) if usable.any() else math.inf, penalty)
    return divergences + extra + math.log(count.mean()) / (orders - 1)


def selection_epsilon(trials: Iterable[Sequence[LedgerEntry]], count: TrialCount, delta: float) -> float:
    """Returns epsilon at delta of releasing the best of K trials, for add/remove of one example.

    ``trials`` are the ledgers of every trial that may be drawn. A mixture's divergence is at most the largest of its
    parts, since the settings are part of what is released.
    """
    distinct = list(dict.fromkeys(tuple(entries) for entries in trials))
    if any(entry.noise_multiplier == 0 for entries in distinct for entry in entries):
        return math.inf
    return solve_group(SelectionCurve(distinct, count), 1, delta)


def score_entry(noise_multiplier: float) -> LedgerEntry:
    """Returns the entry of a noisy count of correct validation rows, which one row moves by at most 1."""
    return LedgerEntry(GAUSSIAN, noise_multiplier, 1.0, 1, "score on validation rows")
