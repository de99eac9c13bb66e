"""Cross-entropy with its weighed cotangents in one pass: a compiled loop over float32 logits on a CPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..compiled import loop
from ..team import carray, pointer_at, share, thread_count, thread_number

LOSS, STRANGE = range(2)
"""Entries of ``found``: the sum of all losses, and how many targets are no class."""


@loop("void(int64, int64, float32[:, ::1], int64[::1], float32[::1], float64[::1], float32[:, ::1], float64[::1])")
def cross_entropy(
    part: int, parts: int, logits: Any, targets: Any, factors: Any, temperature: Any, cotangents: Any, found: Any
) -> None:
    """cotangents[i] <- factors[i] (softmax(logits[i] / temperature) - one-hot target) / temperature, or zero if that is
    not finite. Of one part alone: the losses of all rows are added.
    """
    first, last = share(len(logits), part, parts)
    classes, scale = logits.shape[1], 1.0 / temperature[0]
    for index in range(first, last):
        row, out, target = logits[index], cotangents[index], targets[index]
        if target < 0 or target >= classes:
            found[STRANGE] += 1.0
            continue
        largest, total = -np.inf, 0.0
        for place in range(classes):
            if not row[place] <= largest:  # so written that NaN remains
                largest = np.float64(row[place])
        for place in range(classes):
            value = math.exp((row[place] - largest) * scale)
            out[place] = np.float32(value)
            total += value
        found[LOSS] += math.log(total) - (row[target] - largest) * scale
        factor = factors[index] * scale
        if total < np.inf and abs(np.float32(factor)) < np.inf:
            for place in range(classes):
                out[place] = np.float32(out[place] / total * factor)
            out[target] = np.float32(out[target] - factor)
        else:
            for place in range(classes):
                out[place] = np.float32(0.0)


_cross_entropy = cross_entropy.compiled


@cross_entropy.body
def _(data: Any) -> None:
    field = carray(data, (14,), np.int64)
    logits = carray(pointer_at(field[0]), (field[1], field[2]), np.float32)
    targets = carray(pointer_at(field[3]), (field[4],), np.int64)
    factors = carray(pointer_at(field[5]), (field[6],), np.float32)
    temperature = carray(pointer_at(field[7]), (field[8],), np.float64)
    cotangents = carray(pointer_at(field[9]), (field[10], field[11]), np.float32)
    found = carray(pointer_at(field[12]), (field[13],), np.float64)
    _cross_entropy(thread_number(), thread_count(), logits, targets, factors, temperature, cotangents, found)
