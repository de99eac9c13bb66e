"""How far weights are from references in half precision, as matrices: compiled loops over strips of rows.

For a matrix D cut into strips D_i of rows, ||D||_2^2 <= sum of ||D_i||_2^2, and ||D_i||_2^2 is the largest eigenvalue
of the small matrix D_i D_i^T. For noise of 512 x 3136 the bound is 2.7 times closer than the Frobenius norm, for a
matrix of rank one it is exact, and it is never above the Frobenius norm but for rounding.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from ..compiled import loop
from ..team import carray, pointer_at, share, thread_count, thread_number
from .packed import _differences, _wide

ROWS = 8
_TILE = 512  # columns whose differences stay in a processor's first cache
_SQUARINGS = 4  # 8 equal eigenvalues are then bounded by 8^(1/32) times theirs


def differences_without_detail(weight: Any, coarse: Any, factor: float, out: Any) -> None:
    for column in range(len(weight)):
        out[column] = weight[column] - factor * _wide(coarse[column])


_differences_without_detail = numba.njit(error_model="numpy")(differences_without_detail)


def products(a: Any, b: Any, c: Any, d: Any) -> tuple[float, float, float, float]:
    ac, ad, bc, bd = 0.0, 0.0, 0.0, 0.0
    for column in range(len(a)):
        ac += a[column] * c[column]
        ad += a[column] * d[column]
        bc += b[column] * c[column]
        bd += b[column] * d[column]
    return ac, ad, bc, bd


_products = numba.njit(error_model="numpy", fastmath={"reassoc", "contract"})(products)


def add_products(left: Any, gram: Any) -> None:
    """gram <- gram + left left^T, on and below the diagonal, two rows by two at a time."""
    for i in range(0, ROWS, 2):
        for j in range(0, i + 2, 2):
            ac, ad, bc, bd = _products(left[i], left[i + 1], left[j], left[j + 1])
            gram[i, j] += ac
            gram[i, j + 1] += ad
            gram[i + 1, j] += bc
            gram[i + 1, j + 1] += bd


_add_products = numba.njit(error_model="numpy")(add_products)


def largest_eigenvalue(gram: Any, power: Any) -> float:
    """Upper bound but for rounding, of the lower triangle: trace times the 16th root of ||(G / trace)^16||_F.

    An eigenvalue of G / trace is at least 1/8, so that nothing that matters underflows. Both arguments are overwritten.
    """
    trace = 0.0
    for i in range(ROWS):
        trace += gram[i, i]
    if trace == 0.0:
        return 0.0
    for i in range(ROWS):
        for j in range(i + 1):
            gram[i, j] /= trace
            gram[j, i] = gram[i, j]
    for _ in range(_SQUARINGS):
        for i in range(ROWS):
            for j in range(ROWS):
                total = 0.0
                for k in range(ROWS):
                    total += gram[i, k] * gram[k, j]
                power[i, j] = total
        gram[:, :] = power
    total = 0.0
    for i in range(ROWS):
        for j in range(ROWS):
            total += gram[i, j] * gram[i, j]
    for _ in range(_SQUARINGS + 1):
        total = math.sqrt(total)
    return trace * total


_largest_eigenvalue = numba.njit(error_model="numpy")(largest_eigenvalue)


@loop("void(int64, int64, float32[:, ::1], int16[:, ::1], float64, int16[:, ::1], float64, float64[::1])")
def square_norms(
    part: int, parts: int, weight: Any, coarse: Any, factor: float, detail: Any, factor_of_detail: float, squares: Any
) -> None:
    """squares[k] <- ||rows 8 k to 8 k + 7 of weight - factor * coarse - factor_of_detail * detail||_2^2, or more."""
    rows, columns = weight.shape
    left, gram, power = np.zeros((ROWS, _TILE)), np.empty((ROWS, ROWS)), np.empty((ROWS, ROWS))
    first, last = share(len(squares), part, parts)
    for strip in range(first, last):
        top = strip * ROWS
        height = min(ROWS, rows - top)
        left[height:] = 0.0
        gram[:] = 0.0
        for begin in range(0, columns, _TILE):
            end = min(begin + _TILE, columns)
            for row in range(height):
                own, of_coarse = weight[top + row, begin:end], coarse[top + row, begin:end]
                if factor_of_detail == 0.0:
                    _differences_without_detail(own, of_coarse, factor, left[row, : end - begin])
                else:
                    of_detail = detail[top + row, begin:end]
                    _differences(own, of_coarse, factor, of_detail, factor_of_detail, left[row, : end - begin])
            left[:height, end - begin :] = 0.0  # of a tile that is not full
            _add_products(left, gram)
        squares[strip] = _largest_eigenvalue(gram, power)


_square_norms = square_norms.compiled


@square_norms.body
def _(data: Any) -> None:
    field, number = carray(data, (13,), np.int64), carray(data, (13,), np.float64)
    weight = carray(pointer_at(field[0]), (field[1], field[2]), np.float32)
    coarse = carray(pointer_at(field[3]), (field[4], field[5]), np.int16)
    detail = carray(pointer_at(field[7]), (field[8], field[9]), np.int16)
    squares = carray(pointer_at(field[11]), (field[12],), np.float64)
    _square_norms(thread_number(), thread_count(), weight, coarse, number[6], detail, number[10], squares)
