"""Pairs of channels put in order, and back: compiled loops over float32 on a CPU."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from ..compiled import loop
from ..team import carray, pointer_at, share, thread_count, thread_number


def order(first: Any, second: Any, larger: Any, smaller: Any, swapped: Any) -> None:
    for place in range(len(first)):
        a, b = first[place], second[place]
        larger[place] = b if b > a else a
        smaller[place] = a if b > a else b
        swapped[place] = b > a


def place_back(first: Any, second: Any, swapped: Any, of_first: Any, of_second: Any) -> None:
    for place in range(len(first)):
        a, b, other = first[place], second[place], swapped[place] != 0
        of_first[place] = b if other else a
        of_second[place] = a if other else b


# functions of their own, with indices that cannot be negative: only so are they made of vector instructions
_order = numba.njit(error_model="numpy")(order)
_place_back = numba.njit(error_model="numpy")(place_back)


@loop("void(int64, int64, float32[:, :, ::1], float32[:, :, ::1], uint8[:, ::1])")
def in_order(part: int, parts: int, pairs: Any, out: Any, swapped: Any) -> None:
    """out[i, :, p] <- pairs[i, :, p], the larger one first; swapped[i, p] <- whether they changed places."""
    first, last = share(len(pairs), part, parts)
    if pairs.shape[2] == 1:  # then the two of a pair are neighbours
        own, found = pairs[first:last, :, 0], out[first:last, :, 0]
        _order(own[:, 0], own[:, 1], found[:, 0], found[:, 1], swapped[first:last, 0])
        return
    for index in range(first, last):
        _order(pairs[index, 0], pairs[index, 1], out[index, 0], out[index, 1], swapped[index])


_in_order = in_order.compiled


@in_order.body
def _(data: Any) -> None:
    field = carray(data, (11,), np.int64)
    pairs = carray(pointer_at(field[0]), (field[1], field[2], field[3]), np.float32)
    out = carray(pointer_at(field[4]), (field[5], field[6], field[7]), np.float32)
    swapped = carray(pointer_at(field[8]), (field[9], field[10]), np.uint8)
    _in_order(thread_number(), thread_count(), pairs, out, swapped)


@loop("void(int64, int64, float32[:, :, ::1], uint8[:, ::1], float32[:, :, ::1])")
def swap(part: int, parts: int, pairs: Any, swapped: Any, out: Any) -> None:
    """out <- pairs, whose two values change places where ``swapped`` is not 0."""
    first, last = share(len(pairs), part, parts)
    if pairs.shape[2] == 1:
        own, found = pairs[first:last, :, 0], out[first:last, :, 0]
        _place_back(own[:, 0], own[:, 1], swapped[first:last, 0], found[:, 0], found[:, 1])
        return
    for index in range(first, last):
        _place_back(pairs[index, 0], pairs[index, 1], swapped[index], out[index, 0], out[index, 1])


_swap = swap.compiled


@swap.body
def _(data: Any) -> None:
    field = carray(data, (11,), np.int64)
    pairs = carray(pointer_at(field[0]), (field[1], field[2], field[3]), np.float32)
    swapped = carray(pointer_at(field[4]), (field[5], field[6]), np.uint8)
    out = carray(pointer_at(field[7]), (field[8], field[9], field[10]), np.float32)
    _swap(thread_number(), thread_count(), pairs, swapped, out)
