"""Makes private choices: the exponential mechanism (004 Algorithm 4), permute-and-flip, private Frank-Wolfe."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from lipdp_lightning.curves.discrete_noise import NoiseSource, bernoulli_exp, permute_and_flip, uniform_below
from lipdp_lightning.key_streams import CounterStream
from lipdp_lightning.studies.pure.mixed_ledger import CHOICE, PureEntry

Choice = Callable[[CounterStream, Sequence[int], int, float], int]
_UNIT = 1 << 16  # the integer that a sensitivity of one becomes


def exponential_mechanism(stream: CounterStream, utilities: Sequence[int], sensitivity: int, epsilon: float) -> int:
    """Returns an index with probability proportional to exp(epsilon u / (2 sensitivity)), exactly.

    A candidate is drawn uniformly and kept with probability exp(epsilon (u - max u) / (2 sensitivity)); otherwise all
    is drawn again. One example changes u by at most the sensitivity, and so the logarithm of any probability by at
    most epsilon: half of it through the candidate's own weight, half through the sum of all weights.
    """
    rate = Fraction(math.floor(Fraction(epsilon) * (1 << 20)), 1 << 20) / (2 * sensitivity)
    best = max(utilities)
    while True:
        index = int(uniform_below(stream, len(utilities), 1)[0])
        whole, part = divmod(min(rate * (best - utilities[index]), Fraction(128)), 1)  # exp(-128) never happens
        if not bool(np.all(bernoulli_exp(stream, np.ones(int(whole), dtype=np.int64), 1))):
            continue
        if bool(bernoulli_exp(stream, np.array([part.numerator], dtype=np.int64), part.denominator)[0]):
            return index


def choose(
    utilities: Sequence[float],
    sensitivity: float,
    epsilon: float,
    source: NoiseSource,
    mechanism: Choice = permute_and_flip,
) -> int:
    """Returns the index of a large utility, epsilon-DP if one example moves no utility by more than the sensitivity.

    Utilities are rounded to 2^-16 of the sensitivity, and the rounding is part of the sensitivity that is used.
    """
    if not (sensitivity > 0 and math.isfinite(sensitivity) and epsilon > 0):
        raise ValueError(f"sensitivity {sensitivity} and epsilon {epsilon} must be positive. HINT: use 1 for counts.")
    whole = [round(value / sensitivity * _UNIT) for value in utilities]
    return mechanism(source.stream(), whole, _UNIT + 1, epsilon)


def choice_entry(epsilon: float, count: int = 1, label: str = "choice") -> PureEntry:
    """Returns the ledger's entry of choices that are epsilon-DP for adding or removing one example."""
    return PureEntry(CHOICE, 1 / epsilon, 1.0, count, label)


def frank_wolfe(
    gradient: Callable[[Tensor], Tensor],
    features: int,
    radius: float,
    sensitivity: float,
    steps: int,
    epsilon: float,
    source: NoiseSource,
) -> Tensor:
    """Returns weights in the l1 ball of this radius, by Frank-Wolfe steps whose vertices are chosen privately.

    The utility of the vertex radius * sign * e_j is - sign * g_j, and one example moves it by at most the sensitivity
    in the largest entry of the summed gradient, whatever the number of features (Talwar, Thakurta and Zhang 2015).
    Each step is `choice_entry(epsilon)`.

    Args:
        gradient: maps weights to the summed gradient over all examples.
        features: the number of weights.
        radius: the l1 norm of the vertices.
        sensitivity: a bound on the largest entry of one example's gradient.
        steps: the number of choices.
        epsilon: the epsilon of one choice.
        source: the source of randomness.
    """
    weights = torch.zeros(features, dtype=torch.float64)
    for step in range(steps):
        slope = gradient(weights)
        chosen = choose([*(-slope).tolist(), *slope.tolist()], sensitivity, epsilon, source)
        vertex = torch.zeros_like(weights)
        vertex[chosen % features] = radius if chosen < features else -radius
        weights += 2 / (step + 2) * (vertex - weights)
    return weights
