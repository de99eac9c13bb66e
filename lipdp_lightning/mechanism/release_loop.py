"""The last step of a release, compiled: noise and sum in float64, rounded once."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from ..compiled import loop
from ..team import carray, pointer_at, share, thread_count, thread_number


def complete_part(noise: Any, deviation: float, gradient: Any, of_gradient: float, factor: float) -> None:
    for index in range(len(noise)):
        gradient[index] = (deviation * noise[index] + of_gradient * gradient[index]) * factor


# a function of its own, with indices that cannot be negative: only so is it made of vector instructions
_complete_part = numba.njit(error_model="numpy")(complete_part)


@loop(
    *(f"void(int64, int64, float64[::1], float64, {dtype}[::1], float64, float64)" for dtype in ("float32", "float64"))
)
def complete(
    part: int, parts: int, noise: Any, deviation: float, gradient: Any, of_gradient: float, factor: float
) -> None:
    """gradient <- (deviation * noise + of_gradient * gradient) * factor."""
    first, last = share(len(noise), part, parts)
    _complete_part(noise[first:last], deviation, gradient[first:last], of_gradient, factor)


_complete = complete.compiled


@complete.body
def _(data: Any) -> None:
    field, number = carray(data, (7,), np.int64), carray(data, (7,), np.float64)
    noise = carray(pointer_at(field[0]), (field[1],), np.float64)
    gradient = carray(pointer_at(field[3]), (field[4],), np.float32)
    _complete(thread_number(), thread_count(), noise, number[2], gradient, number[5], number[6])
