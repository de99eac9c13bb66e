"""The public grid on which noised sums are released.

The last bits of a floating-point sum depend on the numbers that were added: a result near 0.01 is a multiple of 2^-53
if noise was added to a sum of 1, and has finer bits if it is noise alone. Hence the sum with its noise is rounded to
the nearest multiple of a power of two before it is released. The grid is a function of the noise's deviation alone, so
it is public; it is far coarser than the last bits of any sum, and far finer than the noise (docs/guarantee.md, 1.8).
"""

from __future__ import annotations

import math

FINENESS_BITS = 10
"""A deviation is at least 2^10 steps of its grid, and fewer than 2^11: rounding adds 10^-7 of the variance at most."""

_INTEGER_BITS = 52  # from 2^52 on, float64 numbers are integers


def grid_step(deviation: float) -> float:
    """Returns the step of the grid for noise of this deviation, a power of two; zero without noise."""
    assert math.isfinite(deviation) and deviation >= 0
    if deviation == 0:
        return 0.0
    _, exponent = math.frexp(deviation)
    return math.ldexp(1.0, exponent - 1 - FINENESS_BITS)


def grid_shift(deviation: float) -> float:
    """Returns the number whose addition and subtraction round a float64 value to the grid of this deviation.

    For values below 2^51 steps, ``(value + shift) - shift`` is the nearest multiple of ``grid_step``, with ties to
    even. It is a multiple of the step for larger values, too. Infinities and NaN are kept. Without noise, the shift is
    zero and changes nothing.
    """
    return 1.5 * 2.0**_INTEGER_BITS * grid_step(deviation)
