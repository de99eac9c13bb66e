"""How far a weight went from a reference, as a matrix: a bound on the spectral norm, and a reference nearer to it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .deviations import distances
from .quick_norm import norm_of_strips, quick_norm, strip_width
from .references import (
    Reference,
    bits,
    closer,
    difference,
    half_exponent,
    half_frobenius,
    is_packed,
    loops,
    working_dtype,
)

_DENSE_STRIP = 128
"""The exact norm of a dense layer costs but a few products, so that fewer and closer bounds would cost more."""


def change_from(
    weight: Tensor, coarse: Reference, groups: int | None, room: Tensor | None = None
) -> tuple[Reference, float]:
    """The coarse reference with a detail that takes it to the weight, and a bound on the norm of weight - coarse.

    The bound is on the largest spectral norm among the matrices ``reshape(groups, rows / groups, -1)`` of the
    difference; infinite without ``groups``. The detail is written into ``room`` where it fits.
    """
    if groups is not None and weight.ndim == 2 and weight.shape[0] <= weight.shape[1] and is_packed(weight, coarse):
        distance = distances([weight], [coarse])[0]
        exponent = half_exponent(distance)
        if exponent is not None:
            return _in_strips(weight, coarse, exponent, distance, room)
    left = difference(weight, coarse)
    near = closer(coarse, left)
    if groups is None:
        return near, math.inf
    matrices = left.contiguous().view(groups, weight.shape[0] // groups, -1)
    return near, _with_rounding(quick_norm(matrices, _DENSE_STRIP if weight.ndim == 2 else None), weight, coarse)


def _with_rounding(norm: float, weight: Tensor, coarse: Reference) -> float:
    # ||difference||_F, to which its rounding is relative, is at most the root of its rank times its norm
    rounding = torch.finfo(working_dtype(weight.dtype)).eps * math.sqrt(weight.numel())
    return norm * (1.0 + rounding) + coarse.rounding()


def _in_strips(
    weight: Tensor, coarse: Reference, exponent: int, distance: float, room: Tensor | None
) -> tuple[Reference, float]:
    """Some rows at a time, so that no difference as large as the weight is ever held."""
    rows, columns = weight.shape
    width = strip_width(rows, _DENSE_STRIP)
    fits = room is not None and room.shape == weight.shape and room.dtype == torch.float16
    halves = room if room is not None and fits else torch.empty_like(weight, dtype=torch.float16)
    values, factor, detail, of_detail = bits(coarse)
    flat, left = weight.view(-1).numpy(), torch.empty(width, columns, dtype=torch.float32)

    def strips() -> Iterator[Tensor]:
        for start in range(0, rows, width):
            stop = min(start + width, rows)
            part, own = slice(start * columns, stop * columns), left[: stop - start]
            loops().subtract.alone(flat[part], values[part], factor, detail[part], of_detail, own.view(-1).numpy())
            halves[start:stop] = own.mul_(2.0**exponent)
            yield own

    norm = norm_of_strips(strips()) * 2.0**-exponent
    own = Reference(halves, half_frobenius(distance * 2.0**exponent, weight.numel()), 2.0**-exponent, coarse.dtype)
    return replace(coarse, detail=own), _with_rounding(norm, weight, coarse)
