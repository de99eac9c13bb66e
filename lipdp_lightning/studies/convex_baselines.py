"""Output perturbation and noisy SGD on strongly convex problems (004 Algorithms 5 and 6), accounted by PLD.

The objective is F(w) = (1/N) sum_i l(w; z_i) + (g/2) ||w||^2 with a declared N, and losses l that are convex and
L-Lipschitz in w. It is g-strongly convex.

*Output perturbation.* Let w and w' minimise the objectives of two data sets that differ by one example. The gradient
of one objective at the minimum of the other is at most L / N, and strong convexity gives g ||w - w'|| <= L / N. A
replacement moves the minimum by at most 2 L / (N g). The thesis needs the exact minimum; a point with a gradient of at
most t is within t / g of it, and this is added for both data sets. The thesis calibrates the noise by sqrt(2 ln(1.25 /
delta)) / epsilon, which is proven for epsilon below 1 only; here the multiplier comes from the accountant.

*Noisy SGD.* The thesis prints one sigma for every batch size s. Its steps are subsampled Gaussian releases with the
multiplier sigma / L at the rate s / n, and `printed_epsilon` says what that costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lipdp_lightning.accounting.accountants import ADD_REMOVE, REPLACE_ONE, epsilon_of
from lipdp_lightning.accounting.events import GAUSSIAN, SUBSAMPLED_GAUSSIAN, LedgerEntry
from lipdp_lightning.key_streams import CounterStream
from lipdp_lightning.privacy.grid import grid_shift
from lipdp_lightning.privacy.keys import derive_key

Gradients = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class StronglyConvex:
    """A problem with a declared size.

    Args:
        slopes: maps weights and row numbers to one gradient of the loss per row, without the regulariser.
        rows: the number of rows that there are.
        declared: N, a public number.
        features: the number of weights.
        lipschitz: L, a bound on the norm of any row's gradient at any weights.
        strength: g, the factor of the regulariser.
        smoothness: a bound on the second derivative of any row's loss.
    """

    slopes: Gradients
    rows: int
    declared: int
    features: int
    lipschitz: float
    strength: float
    smoothness: float

    def gradient(self, weights: Tensor) -> Tensor:
        """Returns the gradient of the objective."""
        sums = self.slopes(weights, torch.arange(self.rows)).sum(0)
        return sums / self.declared + self.strength * weights

    def minimum(self, tolerance: float, most_steps: int = 100_000) -> Tensor:
        """Returns a point whose gradient has at most the norm ``tolerance``, by gradient descent."""
        weights = torch.zeros(self.features, dtype=torch.float64)
        # the rate may depend on the private number of rows, since only the point reached is used
        rate = 1 / (self.smoothness * max(1.0, self.rows / self.declared) + self.strength)
        for _ in range(most_steps):
            gradient = self.gradient(weights)
            if float(gradient.norm()) <= tolerance:
                return weights
            weights = weights - rate * gradient
        raise ValueError(f"no point with a gradient of at most {tolerance} was found. HINT: use a larger tolerance.")


def minimum_sensitivity(problem: StronglyConvex, tolerance: float, adjacency: str = ADD_REMOVE) -> float:
    """Returns how far apart the points of `StronglyConvex.minimum` of two neighbouring data sets can be."""
    moved = (2 if adjacency == REPLACE_ONE else 1) * problem.lipschitz / problem.declared
    return (moved + 2 * tolerance) / problem.strength * (1 + 1e-9)


def output_perturbation(
    problem: StronglyConvex, multiplier: float, secret: bytes, tolerance: float = 1e-9, adjacency: str = ADD_REMOVE
) -> Tensor:
    """Returns the minimum with Gaussian noise of ``multiplier`` times its sensitivity; `output_entry` is its ledger."""
    sensitivity = minimum_sensitivity(problem, tolerance, adjacency)
    deviation = multiplier * sensitivity
    noise = CounterStream(derive_key(secret, "output perturbation")).normal(problem.features)
    shift = grid_shift(deviation)
    return (problem.minimum(tolerance) + deviation * noise + shift) - shift


def output_entry(multiplier: float, adjacency: str = ADD_REMOVE) -> LedgerEntry:
    """Returns the ledger's entry of one `output_perturbation`; its sensitivity is already that of the relation.

    The accountant's replace-one doubles the sensitivity of adding one example, which is half of that of a replacement.
    """
    return LedgerEntry(GAUSSIAN, multiplier * (2 if adjacency == REPLACE_ONE else 1), 1.0, 1, "output perturbation")


def noisy_sgd(
    problem: StronglyConvex, multiplier: float, sample_size: int, steps: int, radius: float, secret: bytes
) -> Tensor:
    """Returns the weights after steps at the rate 1 / (g t) within a ball, averaged with weights in proportion to t.

    Each row is drawn with probability sample_size / N; a sum has noise of multiplier times L and is divided by the
    expected size, drawn rows or not, so that an empty sample is a step as any other.
    """
    rate = sample_size / problem.declared
    stream = CounterStream(derive_key(secret, "noisy sgd"))
    weights, mean = (torch.zeros(problem.features, dtype=torch.float64) for _ in range(2))
    deviation = multiplier * problem.lipschitz
    shift = grid_shift(deviation)
    for step in range(1, steps + 1):
        words = torch.from_numpy((stream.uint64(problem.rows) >> 11).astype("int64")).double()
        drawn = torch.nonzero(words * 2.0**-53 < rate)[:, 0]
        sums = problem.slopes(weights, drawn).sum(0) if len(drawn) else torch.zeros_like(weights)
        released = (sums + deviation * stream.normal(problem.features) + shift) - shift
        weights = weights - (released / sample_size + problem.strength * weights) / (problem.strength * step)
        weights = weights * min(1.0, radius / max(float(weights.norm()), 1e-300))
        mean = mean + 2 * step / (steps * (steps + 1)) * weights
    return mean


def sgd_entry(multiplier: float, rate: float, steps: int) -> LedgerEntry:
    """Returns the ledger's entry of `noisy_sgd`."""
    return LedgerEntry(SUBSAMPLED_GAUSSIAN if rate < 1 else GAUSSIAN, multiplier, rate, steps, "noisy SGD")


def printed_output_multiplier(epsilon: float, delta: float) -> float:
    """Returns the multiplier of 004 Algorithm 5, sqrt(2 ln(1.25 / delta)) / epsilon."""
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def printed_sgd_multiplier(rows: int, steps: int, epsilon: float, delta: float) -> float:
    """Returns sigma / L of 004 Algorithm 6, 16 sqrt(T ln(2 / delta) ln(2.5 T / (delta n))) / (n epsilon)."""
    logs = math.log(2 / delta) * math.log(2.5 * steps / (delta * rows))
    return 16 * math.sqrt(steps * logs) / (rows * epsilon)


def printed_epsilon(rows: int, sample_size: int, steps: int, epsilon: float, delta: float) -> float:
    """Returns the epsilon at delta, for add/remove, of 004 Algorithm 6 with its printed noise for a claimed epsilon."""
    multiplier = printed_sgd_multiplier(rows, steps, epsilon, delta)
    return epsilon_of("pld", [sgd_entry(multiplier, sample_size / rows, steps)], delta).epsilon


def logistic_problem(x: Tensor, y: Tensor, declared: int, strength: float) -> StronglyConvex:
    """Returns logistic regression without an intercept; rows of x are scaled into the unit ball, and y is 0 or 1.

    A row's gradient is (sigmoid(x w) - y) x, whose norm is at most 1, and the second derivative at most 1/4.
    """
    unit = torch.nan_to_num(x.double())
    unit = unit / unit.norm(dim=1, keepdim=True).clamp_min(1.0)

    def slopes(weights: Tensor, rows: Tensor) -> Tensor:
        return (torch.sigmoid(unit[rows] @ weights) - y[rows].double().clamp(0, 1))[:, None] * unit[rows]

    return StronglyConvex(slopes, len(x), declared, x.shape[1], 1.0, strength, 0.25)
