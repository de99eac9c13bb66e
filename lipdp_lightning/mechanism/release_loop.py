"""The last step of a release, compiled: noise and sum in float64, rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compiled import loop
from ..team import carray, pointer_at, share, thread_count, thread_number


@loop(
    *(f"void(int64, int64, float64[::1], float64, {dtype}[::1], float64, float64)" for dtype in ("float32", "float64"))
)
def complete(
    part: int, parts: int, noise: Any, deviation: float, gradient: Any, of_gradient: float, factor: float
) -> None:
    """gradient <- (deviation * noise + of_gradient * gradient) * factor."""
    first, last = share(len(noise), part, parts)
    for index in range(first, last):
        gradient[index] = (deviation * noise[index] + of_gradient * gradient[index]) * factor


_complete = complete.compiled


@complete.body
def _(data: Any) -> None:
    field, number = carray(data, (7,), np.int64), carray(data, (7,), np.float64)
    noise = carray(pointer_at(field[0]), (field[1],), np.float64)
    gradient = carray(pointer_at(field[3]), (field[4],), np.float32)
    _complete(thread_number(), thread_count(), noise, number[2], gradient, number[5], number[6])
