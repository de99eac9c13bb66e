"""What a GPU's tensor cores may do to a sum of products, written out in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
TF32, BF16 = 11, 8
"""Bits of a factor's significand."""


def rounded(values: Floats, bits: int) -> Floats:
    """Returns the nearest numbers with so many bits; ties go away from zero, which lets norms grow most."""
    mantissa, exponent = np.frexp(values)
    scaled = np.ldexp(mantissa, bits)
    return np.ldexp(np.trunc(scaled + np.copysign(0.5, scaled)), exponent - bits)


def _cut_off(values: Floats, exponent: npt.NDArray[np.int64]) -> Floats:
    return np.ldexp(np.trunc(np.ldexp(values, -exponent)), exponent)


def accumulated(products: Floats, at_once: int = 8) -> Floats:
    """Returns the sum over the first axis in float32, a few products at a time, as matrix instructions form it.

    The products of one instruction and the sum before it are cut off at the last of 24 bits of the largest of them,
    and so is their sum: some generations of tensor cores do this, and others keep a few bits more.
    """
    total = np.zeros(products.shape[1:])
    for start in range(0, len(products), at_once):
        parts = np.concatenate([products[start : start + at_once], total[None]])
        largest = np.abs(parts).max(axis=0)
        aligned = _cut_off(parts, np.where(largest > 0, np.frexp(largest)[1] - 24, 0))
        total = aligned.sum(axis=0)
        total = _cut_off(total, np.frexp(total)[1] - 24)
    return total


def piecewise(products: Floats, terms: int) -> Floats:
    """Returns the sum of pieces of so many terms, which are added in float64, as it is stored in float32."""
    pieces = [accumulated(products[start : start + terms]) for start in range(0, len(products), terms)]
    return np.sum(pieces, axis=0).astype(np.float32).astype(np.float64)
