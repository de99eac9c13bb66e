"""Weights beside references, read once: compiled loops over contiguous float32 weights on a CPU.

A half is given by its bits. Differences are taken in float64, where only two products and two subtractions round.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from ..compiled import loop
from ..team import carray, pointer_at, share, thread_count, thread_number

BLOCK = 1 << 15
_SIGNATURE = "void(int64, int64, float32[::1], int16[::1], float64, int16[::1], float64, {}[::1])"


def wide(half: Any) -> Any:
    """The float64 of a finite half: its exponent is rebased by a product, which serves subnormal ones too."""
    bits = np.int64(half)
    magnitude = np.int64((bits & np.int64(0x7FFF)) << np.int64(42))
    sign = np.int64((bits & np.int64(0x8000)) << np.int64(48))
    return np.int64(magnitude | sign).view(np.float64) * 2.0**1008


_wide = numba.njit(error_model="numpy")(wide)


def sum_of_squares(weight: Any, coarse: Any, factor: float, detail: Any, factor_of_detail: float) -> float:
    total = 0.0
    for index in range(len(weight)):
        left = weight[index] - factor * _wide(coarse[index]) - factor_of_detail * _wide(detail[index])
        total += left * left
    return total


_sum_of_squares = numba.njit(error_model="numpy", fastmath={"reassoc"})(sum_of_squares)


def sum_without_detail(weight: Any, coarse: Any, factor: float) -> float:
    total = 0.0
    for index in range(len(weight)):
        left = weight[index] - factor * _wide(coarse[index])
        total += left * left
    return total


_sum_without_detail = numba.njit(error_model="numpy", fastmath={"reassoc"})(sum_without_detail)


@loop(_SIGNATURE.format("float64"))
def add_squares(
    part: int, parts: int, weight: Any, coarse: Any, factor: float, detail: Any, factor_of_detail: float, totals: Any
) -> None:
    """totals[k] <- the sum over the k-th BLOCK of squares of weight - factor * coarse - factor_of_detail * detail.

    Of blocks, and not of parts: the total is the same for any number of threads. The inner loop is a function of its
    own: only so is it made of vector instructions.
    """
    first, last = share(len(totals), part, parts)
    for block in range(first, last):
        begin, end = block * BLOCK, min((block + 1) * BLOCK, len(weight))
        if factor_of_detail == 0.0:
            totals[block] = _sum_without_detail(weight[begin:end], coarse[begin:end], factor)
        else:
            totals[block] = _sum_of_squares(
                weight[begin:end], coarse[begin:end], factor, detail[begin:end], factor_of_detail
            )


_add_squares = add_squares.compiled


@add_squares.body
def _(data: Any) -> None:
    field, number = carray(data, (10,), np.int64), carray(data, (10,), np.float64)
    weight = carray(pointer_at(field[0]), (field[1],), np.float32)
    coarse = carray(pointer_at(field[2]), (field[3],), np.int16)
    detail = carray(pointer_at(field[5]), (field[6],), np.int16)
    totals = carray(pointer_at(field[8]), (field[9],), np.float64)
    _add_squares(thread_number(), thread_count(), weight, coarse, number[4], detail, number[7], totals)


def sum_beside_singles(weight: Any, coarse: Any, factor: float, detail: Any, factor_of_detail: float) -> float:
    total = 0.0
    for index in range(len(weight)):
        left = weight[index] - factor * coarse[index] - factor_of_detail * detail[index]
        total += left * left
    return total


_sum_beside_singles = numba.njit(error_model="numpy", fastmath={"reassoc"})(sum_beside_singles)


WEIGHT, COARSE, DETAIL, ENTRIES = range(4)
"""Columns of a table of places, int64: the addresses of float32 values, and how many they are."""


@loop("void(int64, int64, int64[:, ::1], float64[:, ::1], float64[::1])")
def add_squares_at(part: int, parts: int, places: Any, factors: Any, totals: Any) -> None:
    """totals[k] <- the sum of squares of weight - factor * coarse - factor_of_detail * detail, whose values lie at the
    k-th places: many small weights at once, beside references that are not packed.
    """
    first, last = share(len(totals), part, parts)
    for index in range(first, last):
        length = (places[index, ENTRIES],)
        weight = carray(pointer_at(places[index, WEIGHT]), length, np.float32)
        coarse = carray(pointer_at(places[index, COARSE]), length, np.float32)
        detail = carray(pointer_at(places[index, DETAIL]), length, np.float32)
        totals[index] = _sum_beside_singles(weight, coarse, factors[index, 0], detail, factors[index, 1])


_add_squares_at = add_squares_at.compiled


@add_squares_at.body
def _(data: Any) -> None:
    field = carray(data, (8,), np.int64)
    places = carray(pointer_at(field[0]), (field[1], field[2]), np.int64)
    factors = carray(pointer_at(field[3]), (field[4], field[5]), np.float64)
    totals = carray(pointer_at(field[6]), (field[7],), np.float64)
    _add_squares_at(thread_number(), thread_count(), places, factors, totals)


def differences(weight: Any, coarse: Any, factor: float, detail: Any, factor_of_detail: float, out: Any) -> None:
    for index in range(len(weight)):
        out[index] = weight[index] - factor * _wide(coarse[index]) - factor_of_detail * _wide(detail[index])


_differences = numba.njit(error_model="numpy")(differences)


@loop(_SIGNATURE.format("float32"))
def subtract(
    part: int, parts: int, weight: Any, coarse: Any, factor: float, detail: Any, factor_of_detail: float, out: Any
) -> None:
    """out <- weight - factor * coarse - factor_of_detail * detail, rounded to float32."""
    a, b = share(len(weight), part, parts)
    _differences(weight[a:b], coarse[a:b], factor, detail[a:b], factor_of_detail, out[a:b])
