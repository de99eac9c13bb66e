"""Privacy curves: an upper bound delta(epsilon) for a composition of (subsampled) releases.

A curve is built once per composition and queried many times. The accounting libraries are imported when a
curve is built, so that plans and ledgers load without them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lipdp_lightning.accounting.events import LedgerEntry

# (noise multiplier, sample rate, count)
Release = tuple[float, float, int]

REMOVE, ADD, REPLACE = "REMOVE", "ADD", "REPLACE"


class AccountantFailure(RuntimeError):
    """Raised if a library has no number that can be trusted; the message says why."""


class PrivacyCurve(Protocol):
    def delta_at(self, epsilon: float) -> float:
        """Returns a delta for which the composition is (epsilon, delta)-DP."""


def collect(entries: Iterable[LedgerEntry]) -> list[Release]:
    """Returns the releases of a ledger, equal ones together and all unsampled Gaussians as one.

    The order of a composition does not matter; n Gaussians of multipliers s_i on the same data are exactly one
    of multiplier 1/sqrt(sum 1/s_i^2).
    """
    counts: dict[tuple[float, float], int] = defaultdict(int)
    for entry in entries:
        if entry.mechanism not in LedgerEntry.MECHANISMS:
            raise ValueError(
                f"the noise of {entry.mechanism!r} entries is not Gaussian, and no accountant here knows it."
            )
        counts[entry.noise_multiplier, entry.sample_rate] += entry.count
    releases = [(s, q, n) for (s, q), n in sorted(counts.items()) if q < 1 and n > 0]
    precision = math.fsum(n / s**2 for (s, q), n in counts.items() if q == 1)
    return [*releases, (1 / math.sqrt(precision), 1.0, 1)] if precision > 0 else releases


class RdpCurve:
    """Renyi accounting of the sampled Gaussian (Mironov, Talwar, Zhang 2019), add/remove adjacency.

    The conversion is Theorem 21 of Balle et al. 2020: for every order a > 1,
    log delta = (a - 1) (rdp(a) - epsilon + log(1 - 1/a)) - log a.
    """

    # small orders serve large epsilons, and large ones small epsilons; 1024 is the last whose binomials are finite
    ORDERS = (
        *(1 + x / 1000 for x in (1, 2, 5, 10, 20, 50)),
        *(1 + x / 10 for x in range(1, 100)),
        *range(11, 64),
        *(64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024),
    )

    def __init__(self, releases: Sequence[Release]) -> None:
        self.orders = np.array([float(order) for order in self.ORDERS])
        self.divergences = np.zeros_like(self.orders)
        for noise_multiplier, sample_rate, count in releases:
            self.divergences += count * self._divergences(noise_multiplier, sample_rate)
        if not np.isfinite(self.divergences).any():
            raise AccountantFailure("no Renyi divergence could be computed")

    @classmethod
    @lru_cache(maxsize=64)
    def _divergences(cls, noise_multiplier: float, sample_rate: float) -> npt.NDArray[np.float64]:
        """Returns the divergences of one release at all orders; the array is cached and must not be changed."""
        if sample_rate == 1:
            return np.array([order / (2 * noise_multiplier**2) for order in cls.ORDERS])
        from opacus.accountants.analysis import rdp

        values = np.full(len(cls.ORDERS), math.inf)
        for index, order in enumerate(cls.ORDERS):
            try:  # an order whose series does not converge numerically gives no bound
                value = rdp.compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=float(order))
            except (ValueError, ArithmeticError):
                continue
            if math.isfinite(value):
                values[index] = max(float(value), 0.0)
        return values

    def delta_at(self, epsilon: float) -> float:
        usable = np.isfinite(self.divergences)
        orders, divergences = self.orders[usable], self.divergences[usable]
        log_deltas = (orders - 1) * (divergences - epsilon + np.log1p(-1 / orders)) - np.log(orders)
        return math.exp(min(float(log_deltas.min()), 0.0))


class PldCurve:
    """Privacy loss distributions, discretised pessimistically by connect-the-dots (Doroshenko et al. 2022).

    A curve has one direction: REMOVE and ADD are the two halves of add/remove adjacency, whose curves are
    composed separately and maximised at the end; REPLACE is the exact pair of replace-one adjacency,
    (1-q) N(0, s^2) + q N(-1, s^2) against (1-q) N(0, s^2) + q N(+1, s^2), with the unchanged s.
    """

    POINTS = 200_000  # the grid points of one release
    COMPOSED_POINTS = 1_000_000
    # The transforms do not account for rounding to double precision: a pessimistic delta can come out too small
    # (by 2e-11 at 1e6 steps, against the closed form of the Gaussian). 1e-15 per step is 50 times that error.
    ROUNDING_PER_STEP = 1e-15

    def __init__(self, releases: Sequence[Release], direction: str) -> None:
        from dp_accounting.pld import pld_pmf

        losses = [(_Loss.of(noise_multiplier, q, direction), n) for noise_multiplier, q, n in releases]
        step = self._grid_step(losses)
        self._pmf: Any = None
        for loss, count in losses:
            pmf = _discretised(loss, step)
            if count > 1:
                pmf = pmf.to_dense_pmf().self_compose(count)
            self._pmf = pmf if self._pmf is None else pld_pmf.compose_pmfs(self._pmf, pmf, 1e-15)
        self.rounding = self.ROUNDING_PER_STEP * max(10, sum(n for _, _, n in releases))
        variance = math.fsum(count * loss.variance for loss, count in losses)
        self.deviation = math.sqrt(variance)
        self.looseness = sum(count for _, count in losses) * step**2 / 4 / variance

    def _grid_step(self, losses: Sequence[tuple[_Loss, int]]) -> float:
        """Returns a fortieth of the smallest standard deviation of a loss, unless that is too fine to compute.

        Discretising adds a variance of at most step^2 / 4 to each loss, so only tightness depends on the step.
        """
        widths, mean, variance = [], 0.0, 0.0
        target = math.inf
        for loss, count in losses:
            widths.append(max(loss.upper - loss.lower, 1e-12))
            mean, variance = mean + count * loss.mean, variance + count * loss.variance
            target = min(target, math.sqrt(loss.variance) / 40)
        composed_width = abs(mean) + 20 * math.sqrt(variance) + 2 * sum(widths)
        # below this, differences of deltas are rounding errors, whose mass is noticeable
        noise = math.sqrt(max(n * w for (_, n), w in zip(losses, widths, strict=True)) * 1e-15)
        return max(target, max(widths) / self.POINTS, composed_width / self.COMPOSED_POINTS, noise)

    def delta_at(self, epsilon: float) -> float:
        return min(1.0, self._computed(epsilon) + self.rounding)

    def _computed(self, epsilon: float) -> float:
        return max(0.0, float(self._pmf.get_delta_for_epsilon(float(epsilon))))

    def optimistic(self) -> PrivacyCurve:
        """Returns this curve with the rounding of the transforms subtracted instead of added; it is no upper bound."""
        return _OptimisticCurve(self)


@dataclass(frozen=True)
class _OptimisticCurve:
    curve: PldCurve

    def delta_at(self, epsilon: float) -> float:
        return max(0.0, self.curve._computed(epsilon) - self.curve.rounding)


@dataclass(frozen=True, eq=False)
class _Loss:
    """The privacy loss of one release: the library's object, its range, and its approximate mean and variance."""

    of_library: Any
    lower: float
    upper: float
    mean: float
    variance: float

    @staticmethod
    @lru_cache(maxsize=8)
    def of(noise_multiplier: float, sample_rate: float, direction: str) -> _Loss:
        """Returns a cached object, since only the number of releases changes during a run."""
        from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

        loss = GaussianPrivacyLoss(noise_multiplier, sampling_prob=sample_rate, adjacency_type=AdjacencyType[direction])
        bounds = loss.connect_dots_bounds()
        return _Loss(loss, bounds.epsilon_lower, bounds.epsilon_upper, *_loss_moments(loss))


@lru_cache(maxsize=8)
def _discretised(loss: _Loss, step: float) -> Any:
    """Returns one release on a grid; compositions make new distributions and do not change it."""
    from dp_accounting.pld import pld_pmf

    low, high = math.floor(loss.lower / step), math.ceil(loss.upper / step)
    deltas = loss.of_library.get_delta_for_epsilon(np.arange(low, high + 1) * step)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, low, high, deltas)


def _loss_moments(loss: Any) -> tuple[float, float]:
    """Returns the approximate mean and variance of a privacy loss, by quadrature; they only choose a grid."""
    tail = loss.privacy_loss_tail()
    xs = np.linspace(tail.lower_x_truncation, tail.upper_x_truncation, 4001)
    masses = np.diff(loss.mu_upper_cdf(xs))
    values = np.array([loss.privacy_loss(x) for x in (xs[1:] + xs[:-1]) / 2])
    mean = float(masses @ values)
    return mean, max(float(masses @ (values - mean) ** 2), 1e-24)


class MaximumCurve:
    """The maximum of several curves, such as both directions of add/remove adjacency, at every epsilon."""

    def __init__(self, *curves: PrivacyCurve) -> None:
        self.curves = curves

    def delta_at(self, epsilon: float) -> float:
        return max(curve.delta_at(epsilon) for curve in self.curves)


class PrvCurve:
    """Privacy random variables (Gopi, Lee, Wutschitz 2021) with the error bounds of the paper, REMOVE direction.

    The library is no longer maintained and may be missing; another accountant then answers.

    Its grid has about width * sqrt(steps) / error points and is computed in extended precision. The error is
    0.5 % of epsilon and at most 0.01, or up to 1 % of epsilon if POINTS do not suffice for that. If they do not suffice
    for 1 % either, the constructor raises before it allocates memory.
    """

    POINTS = 600_000

    def __init__(self, releases: Sequence[Release], delta: float, rough_epsilon: float) -> None:
        try:
            from prv_accountant import accountant
            from prv_accountant.privacy_random_variables import (
                GaussianMechanism,
                PoissonSubsampledGaussianMechanism,
            )
        except ImportError as error:
            raise AccountantFailure(f"the package prv-accountant cannot be imported ({error})") from error

        variables = [
            GaussianMechanism(s) if q == 1 else PoissonSubsampledGaussianMechanism(q, s) for s, q, _ in releases
        ]
        self.counts = [n for _, _, n in releases]
        self.delta_error = delta / 1000
        self.error = min(0.01, max(1e-4, 0.005 * rough_epsilon))
        width = 2 * float(accountant.compute_safe_domain_size(variables, self.counts, self.error, self.delta_error))
        # the mesh of Theorem 5.5 is error / sqrt(steps / 2 * log(12 / delta_error))
        points = width * math.sqrt(sum(self.counts) / 2 * math.log(12 / self.delta_error)) / self.error
        points *= len(variables)
        if not math.isfinite(points):
            raise AccountantFailure("the PRV accountant finds no finite range of losses")
        self.error *= max(1.0, points / self.POINTS)
        if self.error > max(1e-4, 0.01 * rough_epsilon):
            raise AccountantFailure(
                f"{sum(self.counts)} steps to a useful error in epsilon take a grid of {points:.0e} points"
            )
        composed = accountant.PRVAccountant(variables, self.error, self.delta_error, self.counts)
        self._composition = composed.compute_composition(self.counts)

    def bracket(self, delta: float) -> tuple[float, float]:
        """Returns a lower and an upper bound of the REMOVE epsilon at the delta the curve was built for."""
        lower, _, upper = self._composition.compute_epsilon(delta, self.delta_error, self.error)
        if not (math.isfinite(lower) and math.isfinite(upper) and lower <= upper):
            raise AccountantFailure(f"the PRV accountant returned the bracket [{lower}, {upper}]")
        return max(float(lower), 0.0), max(float(upper), 0.0)

    def delta_at(self, epsilon: float) -> float:
        delta = float(self._composition.compute_delta_estimate(epsilon - self.error)) + self.delta_error
        if math.isnan(delta):
            raise AccountantFailure("the PRV accountant returned NaN")
        return min(max(delta, self.delta_error), 1.0)
