"""The transformation of Box and Muller in float64, by additions, products, quotients and square roots alone.

Logarithm, sine and cosine are their Taylor series, up to terms below the rounding of the first one. The angle is
reduced in integers, hence exactly. Where a product and a sum are rounded together, IEEE 754 says how, too.
"""

from __future__ import annotations

import math
from math import factorial
from typing import Any

import numba
import numpy as np
from numba import float64
from numba.extending import intrinsic

from ..compiled import loop
from ..team import carray, pointer_at, share, thread_count, thread_number

_RADIANS = math.pi * 2.0**-63
_SMALLEST = 2.0**-126
_ROOT_OF_HALF = int(np.float64(math.sqrt(0.5)).view(np.int64))
_LN2 = round(math.log(2.0) * 2.0**32) * 2.0**-32  # times an exponent: no rounding
_LN2_REST = -4.2009150726810846e-11  # ln 2 - _LN2
_C2, _C4, _C6, _C8, _C10, _C12, _C14, _C16 = (1.0 / factorial(n) for n in range(2, 17, 2))
_S3, _S5, _S7, _S9, _S11, _S13, _S15 = (1.0 / factorial(n) for n in range(3, 16, 2))
_L3, _L5, _L7, _L9, _L11, _L13, _L15, _L17, _L19, _L21 = (1.0 / n for n in range(3, 22, 2))


def _rounded_once(context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once: an instruction of current processors, and a function with the same bits elsewhere."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return float64(float64, float64, float64), generate


_fma: Any = intrinsic(_rounded_once)


def transform_pairs(radii: Any, angles: Any, cosines: Any, sines: Any) -> None:
    """Pairs of uniform 64-bit words to pairs of standard normals.

    For pair j, u^2 = (radii[j]^2 + 1) / 2^126 with u in (0, 1], so its logarithm is finite, and the angle is
    a = 2 pi angles[j] / 2^64, in [-pi, pi]. With r = sqrt(-ln u^2), cosines[j] = r cos(a) and sines[j] = r sin(a).
    The smallest u is 2^-63: r reaches 9.345, which the true law exceeds with probability 1.1e-19.
    """
    for j in range(len(radii)):
        word = np.float64(radii[j])
        # u^2 = m 2^k with m in [sqrt(1/2), sqrt(2)), and ln m = 2 artanh(s)
        bits = np.float64((word * word + 1.0) * _SMALLEST).view(np.int64)
        k = (bits - np.int64(_ROOT_OF_HALF)) >> np.int64(52)
        m = np.int64(bits - (k << np.int64(52))).view(np.float64)
        s = (m - 1.0) / (m + 1.0)
        z = s * s
        rest = _fma(z, _fma(z, _fma(z, _L21, _L19), _L17), _L15)
        rest = _fma(z, _fma(z, _fma(z, _fma(z, _fma(z, _fma(z, rest, _L13), _L11), _L9), _L7), _L5), _L3)
        logarithm = _fma(np.float64(k), _LN2, _fma(2.0 * s * z, rest, _fma(np.float64(k), _LN2_REST, 2.0 * s)))
        r = math.sqrt(-logarithm)
        # a = q pi / 2 + x with x in [-pi / 4, pi / 4]
        angle = angles[j]
        q = (angle + np.int64(1 << 61)) >> np.int64(62)
        x = np.float64(angle - (q << np.int64(62))) * _RADIANS
        z = -x * x
        rest = _fma(z, _fma(z, _fma(z, _S15, _S13), _S11), _S9)
        sine = _fma(x * z, _fma(z, _fma(z, _fma(z, rest, _S7), _S5), _S3), x)
        rest = _fma(z, _fma(z, _fma(z, _fma(z, _C16, _C14), _C12), _C10), _C8)
        cosine = _fma(z, _fma(z, _fma(z, _fma(z, rest, _C6), _C4), _C2), 1.0)
        of_sine = cosine if q & 1 else sine
        of_cosine = sine if q & 1 else cosine
        cosines[j] = r * (-of_cosine if (q + 1) & 2 else of_cosine)
        sines[j] = r * (-of_sine if q & 2 else of_sine)


pairs = numba.njit(error_model="numpy")(transform_pairs)
"""For loops that say which pairs: the words of pair j of a row are its words j and h + j, for a row of 2h words."""


@loop("void(int64, int64, int64[:, ::1], float64[:, ::1])")
def transform(part: int, parts: int, words: Any, out: Any) -> None:
    """Every row of 2h words to 2h normals, whose places are those of the words.

    The inner loop is a function of its own: only so is it made of vector instructions.
    """
    first, last = share(len(out), part, parts)
    half = out.shape[1] // 2
    for row in range(first, last):
        pairs(words[row, :half], words[row, half:], out[row, :half], out[row, half:])


_transform = transform.compiled


@transform.body
def _(data: Any) -> None:
    field = carray(data, (6,), np.int64)
    words = carray(pointer_at(field[0]), (field[1], field[2]), np.int64)
    out = carray(pointer_at(field[3]), (field[4], field[5]), np.float64)
    _transform(thread_number(), thread_count(), words, out)
