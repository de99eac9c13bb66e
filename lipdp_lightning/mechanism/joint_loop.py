"""The factors of the joint scaling on a CPU: a compiled loop over the norms of all uses."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compiled import loop
from ..team import share


@loop("void(int64, int64, float32[:, ::1], float64[::1], int64[::1], float64[::1], float64, float32[::1])")
def joint_factors(
    part: int, parts: int, norms: Any, weights: Any, groups: Any, constants: Any, floor: float, out: Any
) -> None:
    """out[i] <- 1 / max(floor, root of the sum over groups of squares of its constant + its weights[u] norms[u, i])."""
    first, last = share(len(out), part, parts)
    sums = np.empty(len(constants))
    for index in range(first, last):
        for group in range(len(constants)):
            sums[group] = constants[group]
        for use in range(len(weights)):
            sums[groups[use]] += weights[use] * norms[use, index]
        squares = 0.0
        for group in range(len(constants)):
            squares += sums[group] * sums[group]
        root = np.sqrt(squares)
        if root < floor:  # so written that NaN remains
            root = floor
        out[index] = np.float32(1.0 / root)
