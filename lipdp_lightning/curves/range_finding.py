"""Finds a range with part of the budget, among public candidates: powers of two."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lipdp_lightning.curves.discrete_noise import NoiseSource, permute_and_flip
from lipdp_lightning.curves.releases import CurveRelease, check_privacy

EXPONENTS = range(-20, 61)
_UNIT = 1024  # unit of the integer utilities
_PENALTY = 2.0  # a doubling of the range must catch this many records / epsilon


@dataclass(frozen=True)
class FoundRange:
    low: float
    high: float
    release: CurveRelease


def find_range(values: npt.ArrayLike, epsilon: float, adjacency: str, source: NoiseSource) -> FoundRange:
    """Returns [-R, R], [0, R] or [-R, 0] for a power of two R, epsilon-DP; values outside it must be clamped.

    It makes two choices of epsilon / 2 by permute-and-flip: the magnitude, then the sign. The utility of a range is
    minus the number of values outside it, which one record changes by at most one under either relation, minus a public
    penalty for its size.
    """
    check_privacy(epsilon, 0.0, adjacency)
    data = np.asarray(values, dtype=np.float64).reshape(-1)
    half = epsilon / 2
    step = round(_UNIT * _PENALTY / half)
    sizes = np.sort(np.abs(data))
    outside = [len(data) - int(np.searchsorted(sizes, 2.0**k, side="right")) for k in EXPONENTS]
    utilities = [-_UNIT * count - step * i for i, count in enumerate(outside)]
    radius = 2.0 ** EXPONENTS[permute_and_flip(source.stream(), utilities, _UNIT, half)]
    candidates = [(-radius, radius), (0.0, radius), (-radius, 0.0)]
    lost = [int(np.sum((data < low) | (data > high))) for low, high in candidates]
    signs = [-_UNIT * count - (step if i == 0 else 0) for i, count in enumerate(lost)]
    low, high = candidates[permute_and_flip(source.stream(), signs, _UNIT, half)]
    text = f"range [{low:g}, {high:g}] by permute-and-flip over powers of two, epsilon / 2 for size and for sign"
    return FoundRange(low, high, CurveRelease("range", text, epsilon, 0.0, adjacency))
