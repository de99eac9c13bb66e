"""The factors of the joint scaling on a CPU: a compiled loop over the norms of all uses."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compiled import loop
from ..team import carray, pointer_at, share, thread_count, thread_number


@loop("void(int64, int64, int64[::1], float64[::1], int64[::1], float64[::1], float64[::1], float32[::1])")
def joint_factors(
    part: int, parts: int, places: Any, weights: Any, groups: Any, constants: Any, floor: Any, out: Any
) -> None:
    """out[i] <- 1 / max(floor, root of the sum over groups of squares of its constant + its weights[u] norms[u, i]).

    The norms of use u are as many float32 as ``out`` has, and lie at places[u]; ``floor`` is one number.
    """
    first, last = share(len(out), part, parts)
    sums, length = np.empty(len(constants)), len(out)
    for index in range(first, last):
        for group in range(len(constants)):
            sums[group] = constants[group]
        for use in range(len(weights)):
            sums[groups[use]] += weights[use] * carray(pointer_at(places[use]), (length,), np.float32)[index]
        squares = 0.0
        for group in range(len(constants)):
            squares += sums[group] * sums[group]
        root = np.sqrt(squares)
        if root < floor[0]:  # so written that NaN remains
            root = floor[0]
        out[index] = np.float32(1.0 / root)


_joint_factors = joint_factors.compiled


@joint_factors.body
def _(data: Any) -> None:
    field = carray(data, (12,), np.int64)
    places = carray(pointer_at(field[0]), (field[1],), np.int64)
    weights = carray(pointer_at(field[2]), (field[3],), np.float64)
    groups = carray(pointer_at(field[4]), (field[5],), np.int64)
    constants = carray(pointer_at(field[6]), (field[7],), np.float64)
    floor = carray(pointer_at(field[8]), (field[9],), np.float64)
    out = carray(pointer_at(field[10]), (field[11],), np.float32)
    _joint_factors(thread_number(), thread_count(), places, weights, groups, constants, floor, out)
