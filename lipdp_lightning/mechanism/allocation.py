"""Shares the noise among the parameter groups: public sensitivities in, standard deviations out.

One step releases, per group k, a sum of c_ik g_ik over the sampled examples plus N(0, sigma_k^2 I). All
groups together are one Gaussian mechanism of noise multiplier sigma if, for every possible example
(docs/guarantee.md, what is released),

    sum_k ||c_ik g_ik||^2 / sigma_k^2  <=  1 / sigma^2.

With a bound ||c_ik g_ik|| <= Delta_k per group this follows from sum_k Delta_k^2 / sigma_k^2 <= 1 / sigma^2,
which is asserted of everything returned here. Taking sigma_k = sigma Delta_k on each of K groups (papers 000
and 004) releases K / sigma^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..privacy.plan import PrivacyPlan
from ..privacy.plan_parts import CustomShares, Shares, Unsettled
from .step_errors import Allocation, checked_weights

Numbers = Mapping[str, float]

_RELEASE_TOLERANCE = 1e-12


def sum_margin(rows: float, tensor_cores: bool = False) -> float:
    """Returns the factor on a sensitivity D that covers rounding in norms, factors and a sum over so many rows.

    * 2^-16 covers norms and factors of one example.
    * The stored sum may be as large as rows D, so it is rounded by up to 2^-24 of that, with an example and without it.
    * Sums are formed in pieces of 2^14 terms (layers/contribution.py), which are added in float64. The roundings
      within a piece cost 2^-10 in IEEE float32, and 2^-9 on tensor cores, which may cut off where a CPU rounds to the
      nearest number. These two are measured on adversarial sums and not proved: the worst case over all orders of
      summation grows with the product of rows and terms.
    * On tensor cores, the factors of the product are first rounded to 11 bits: ||x'|| <= (1 + 2^-11) ||x|| and the
      same for the cotangent, whatever the others in the batch, and g = d x^T is bounded by ||d|| ||x||. The product of
      two such factors has 22 bits and is exact in float32. Factors in bfloat16 have 8 bits, and are not rounded at all.

    docs/guarantee.md, "Sums over the batch", has the proofs, and what the measurements were.
    """
    share = (1.0 + 2.0**-11) ** 2 * (1.0 + 2.0**-9) if tensor_cores else 1.0 + 2.0**-10
    return share + 2.0**-16 + 2.0**-23 * rows


@dataclass(frozen=True)
class NoiseBudget:
    """The noise that a plan gives one step: how much there is, and how the groups share it.

    Attributes:
        noise_multiplier: sigma of the joint condition.
        allocation: how the noise is shared; ``weights`` belong to 'custom', as shares of the budget by name pattern.
        expected_batch_size: the declared number by which released sums are divided.
        views: the number of rows per example in the sum of gradients, each bounded by itself; their mean is released.
        tensor_cores: whether a GPU may round the factors of sums over the batch to TF32.
    """

    noise_multiplier: float
    allocation: Allocation
    expected_batch_size: float
    views: int = 1
    weights: Mapping[str, float] | None = None
    tensor_cores: bool = False

    @classmethod
    def of(cls, plan: PrivacyPlan, views: int = 1, tensor_cores: bool = False) -> NoiseBudget:
        """Returns the budget of one step under a plan; custom weights are scaled to sum to 1."""
        match plan.shares:
            case Unsettled():
                raise AssertionError("the plan's scaling is not settled")
            case Shares(rule=rule):
                return cls(plan.noise_multiplier, rule, plan.expected_batch_size, views, None, tensor_cores)
            case CustomShares(weights=given):
                total = math.fsum(weight for _, weight in given)
                weights = {pattern: weight / total for pattern, weight in given}
                return cls(plan.noise_multiplier, "custom", plan.expected_batch_size, views, weights, tensor_cores)

    def margin(self, partial_sums: float) -> float:
        """Returns the rounding margin of a sensitivity; views are rows that are added, too."""
        return sum_margin((self.expected_batch_size + partial_sums) * self.views, self.tensor_cores)

    def deviations(self, sensitivities: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, float]:
        """Returns sigma_k for groups that each meet a bound of their own; zero in a run without noise."""
        if self.noise_multiplier == 0:
            return dict.fromkeys(sensitivities, 0.0)
        return allocate(sensitivities, sizes, self.noise_multiplier, self.allocation, weights=self.weights)

    def thresholds(self, worst_case: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, float]:
        """Returns tau_k for groups that meet one condition together."""
        return joint_thresholds(worst_case, sizes, self.allocation, weights=self.weights)


def squared_release(sensitivities: Mapping[str, float], deviations: Mapping[str, float]) -> float:
    """Returns sum_k Delta_k^2 / sigma_k^2, the inverse square of the joint noise multiplier.

    It is infinite if a group with a positive sensitivity has no noise.
    """
    total = 0.0
    for name, sensitivity in sensitivities.items():
        if sensitivity > 0:
            deviation = deviations[name]
            total += (sensitivity / deviation) ** 2 if deviation > 0 else math.inf
    return total


def allocate(
    sensitivities: Mapping[str, float],
    sizes: Mapping[str, int],
    noise_multiplier: float,
    allocation: Allocation = "global",
    *,
    weights: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Returns the noise deviation sigma_k of every group, with squared_release at most 1 / noise_multiplier^2.

    * equal: sigma sqrt(K) Delta_k, noise in proportion to the bound ("local" of paper 001, composed);
    * global: sigma sqrt(sum_j Delta_j^2) for all, isotropic ("global" of paper 001);
    * optimal: sigma sqrt(S Delta_k / sqrt(d_k)), S = sum_j Delta_j sqrt(d_j): the least sum_k d_k sigma_k^2;
    * custom: sigma Delta_k / sqrt(w_k). `weights` maps patterns of group names to shares of the budget, which
      sum to 1. A group takes the first pattern that matches it; a pattern's groups divide its share equally.

    Sensitivities must be public: functions of the weights, the plan and the architecture, never of the
    batch. K counts the groups with Delta_k > 0; a group whose Delta_k is 0 cannot move, gets deviation 0,
    and its custom weight is shared out among the others in proportion.
    """
    weights = checked_weights(sensitivities, sizes, noise_multiplier, allocation, weights)
    active = {name: value for name, value in sensitivities.items() if value > 0}
    unit = _UNIT_DEVIATIONS[allocation](active, sizes, weights)
    deviations = {name: noise_multiplier * unit.get(name, 0.0) for name in sensitivities}
    release = squared_release(sensitivities, deviations) * noise_multiplier**2
    assert release <= 1 + _RELEASE_TOLERANCE, f"allocation {allocation} releases {release} times its budget"
    return deviations


def joint_thresholds(
    worst_case: Mapping[str, float],
    sizes: Mapping[str, int],
    allocation: Allocation = "global",
    *,
    weights: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Returns the public thresholds tau_k of the `joint` scaling, whose noise is sigma_k = sigma tau_k.

    This scaling multiplies example i's loss by c_i = 1 / sqrt(sum_k (l_k n_ik / tau_k)^2). Since ||g_ik|| <= l_k n_ik,

        sum_k ||c_i g_ik||^2 / sigma_k^2  <=  c_i^2 sum_k (l_k n_ik / tau_k)^2 / sigma^2  =  1 / sigma^2

    for ANY positive public tau_k: the condition holds as a whole, and the allocation only says how the
    noise is shared. From worst-case sensitivities (n_ik at its bound) every c_i is at least 1. A group
    whose worst case is 0 has threshold 0, and is left out of the sum.
    """
    return allocate(worst_case, sizes, 1.0, allocation, weights=weights)


def _equal(active: Numbers, sizes: Mapping[str, int], weights: Numbers) -> dict[str, float]:
    return {name: math.sqrt(len(active)) * value for name, value in active.items()}


def _global(active: Numbers, sizes: Mapping[str, int], weights: Numbers) -> dict[str, float]:
    return dict.fromkeys(active, math.hypot(*active.values()))


def _optimal(active: Numbers, sizes: Mapping[str, int], weights: Numbers) -> dict[str, float]:
    total = math.sqrt(math.fsum(value * math.sqrt(sizes[name]) for name, value in active.items()))
    return {name: total * math.sqrt(value / math.sqrt(sizes[name])) for name, value in active.items()}


def _custom(active: Numbers, sizes: Mapping[str, int], weights: Numbers) -> dict[str, float]:
    total = math.fsum(weights[name] for name in active)
    return {name: value * math.sqrt(total / weights[name]) for name, value in active.items()}


_UNIT_DEVIATIONS: Mapping[str, Callable[[Numbers, Mapping[str, int], Numbers], dict[str, float]]] = {
    "equal": _equal,
    "global": _global,
    "optimal": _optimal,
    "custom": _custom,
}
