"""Weights beside references in half precision, read once: compiled loops over contiguous float32 weights on a CPU.

A half is given by its bits. Differences are taken in float64, where only two products and two subtractions round.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from ..compiled import loop

_SIGNATURE = "void(float32[::1], int16[::1], float64, int16[::1], float64, {}[::1])"


def wide(half: Any) -> Any:
    """The float64 of a finite half: its exponent is rebased by a product, which serves subnormal ones too."""
    bits = np.int64(half)
    magnitude = np.int64((bits & np.int64(0x7FFF)) << np.int64(42))
    sign = np.int64((bits & np.int64(0x8000)) << np.int64(48))
    return np.int64(magnitude | sign).view(np.float64) * 2.0**1008


_wide = numba.njit(error_model="numpy")(wide)


@loop(_SIGNATURE.format("float64"), any_order=True)
def add_squares(weight: Any, coarse: Any, factor: float, detail: Any, factor_of_detail: float, total: Any) -> None:
    """total[0] += the sum of squares of weight - factor * coarse - factor_of_detail * detail."""
    own = 0.0
    for index in range(len(weight)):
        left = weight[index] - factor * _wide(coarse[index]) - factor_of_detail * _wide(detail[index])
        own += left * left
    total[0] += own


@loop(_SIGNATURE.format("float32"))
def subtract(weight: Any, coarse: Any, factor: float, detail: Any, factor_of_detail: float, out: Any) -> None:
    """out <- weight - factor * coarse - factor_of_detail * detail, rounded to float32."""
    for index in range(len(weight)):
        out[index] = weight[index] - factor * _wide(coarse[index]) - factor_of_detail * _wide(detail[index])
