"""Draws exact discrete noise, from one stream per draw.

Counts are integers, and so is their noise: sampled exactly, from uniform integers alone (Canonne, Kamath and Steinke
2020, section 5), it has none of the gaps through which textbook floating-point Laplace noise reveals its input.
Gaussian noise is float64, rounded to a grid on which the sum with an integer is exact: that equals rounding the noised
value, a post-processing; the normals beneath it are approximate in their last bits (see
`lipdp_lightning.privacy.keys`), which is mitigated, not proven away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from lipdp_lightning.key_streams import CounterStream
from lipdp_lightning.privacy.keys import derive_key, new_secret

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

GRID = 2.0**-20  # grid of Gaussian noise, in units of the smallest power of two above its deviation
_SCALE_BITS = 20
_LARGEST = 1 << 46  # largest numerator, whose products with small integers stay below 2^63


class NoiseSource:
    """Provides streams under one secret, a new one for every draw, so that no two curves have the same noise.

    Args:
        secret: 128 bits; by default a new one from the operating system. A fixed secret is for tests: whoever knows it
            can subtract the noise.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = new_secret() if secret is None else secret
        self._drawn = 0

    def stream(self) -> CounterStream:
        self._drawn += 1
        return CounterStream(derive_key(self._secret, "curve", self._drawn))


def exact_scale(cost: Fraction | int, epsilon: float) -> Fraction:
    """Returns cost / epsilon, rounded up to a multiple of a power of two that the sampler can work with."""
    exact = Fraction(cost) / Fraction(epsilon)
    for bits in range(_SCALE_BITS, -1, -1):
        scale = Fraction(math.ceil(exact * (1 << bits)), 1 << bits)
        if scale.numerator < _LARGEST:
            return scale
    digits = len(str(math.ceil(exact))) - 1  # a scale may be larger than any float
    raise ValueError(f"epsilon {epsilon} needs noise of scale 1e{digits}. HINT: use an epsilon of 1e-6 or more.")


def uniform_below(stream: CounterStream, bound: int, count: int) -> IntArray:
    """Returns exactly uniform integers in [0, bound), by rejection."""
    assert 0 < bound < 1 << 62
    limit = (1 << 63) // bound * bound
    out = np.empty(0, dtype=np.int64)
    while out.size < count:
        words = (stream.uint64(count - out.size) >> np.uint64(1)).astype(np.int64)
        out = np.concatenate([out, words[words < limit] % bound])
    return out


def bernoulli_exp(stream: CounterStream, numerators: IntArray, denominator: int) -> BoolArray:
    """Returns True with probability exp(-numerator / denominator), exactly, for numerators in [0, denominator].

    It uses the alternating series of exp: with A_k true with probability gamma / k, the first k at which A_k is false
    is odd with probability exp(-gamma).
    """
    result = np.zeros(numerators.size, dtype=np.bool_)
    active = np.arange(numerators.size)
    k = 1
    while active.size:
        more = uniform_below(stream, denominator * k, active.size) < numerators[active]
        result[active[~more]] = k % 2 == 1
        active = active[more]
        k += 1
    return result


def discrete_laplace(stream: CounterStream, count: int, scale: Fraction) -> IntArray:
    """Returns integers with probability proportional to exp(-|k| / scale), exactly.

    A shift by one changes every probability by a factor of at most exp(1 / scale). The variance is 2 p / (1 - p)^2 with
    p = exp(-1 / scale), below 2 scale^2.
    """
    top, bottom = scale.numerator, scale.denominator
    out = np.empty(0, dtype=np.int64)
    while out.size < count:
        wanted = 2 * (count - out.size) + 16
        low = uniform_below(stream, top, wanted)
        low = low[bernoulli_exp(stream, low, top)]
        size = (low + top * _geometric(stream, low.size)) // bottom
        negative = (stream.uint64(size.size) & np.uint64(1)).astype(np.bool_)
        kept = ~(negative & (size == 0))  # zero has one sign
        out = np.concatenate([out, np.where(negative, -size, size)[kept]])
    return out[:count]


def _geometric(stream: CounterStream, count: int) -> IntArray:
    """Returns how many times in a row an event of probability exp(-1) happens."""
    out = np.zeros(count, dtype=np.int64)
    active = np.arange(count)
    while active.size:
        active = active[bernoulli_exp(stream, np.ones(active.size, dtype=np.int64), 1)]
        out[active] += 1
    return out


def discrete_laplace_variance(scale: Fraction) -> float:
    p = math.exp(-1 / float(scale))
    return 2 * p / math.expm1(-1 / float(scale)) ** 2


def gaussian_noise(stream: CounterStream, count: int) -> FloatArray:
    return stream.normal(count).numpy()


def on_grid(noise: FloatArray, deviation: float) -> FloatArray:
    """Rounds noise to a dyadic grid a million times finer than its deviation, so that adding an integer is exact."""
    step = GRID * 2.0 ** math.ceil(math.log2(deviation))
    return np.round(noise / step) * step


def permute_and_flip(stream: CounterStream, utilities: Sequence[int], sensitivity: int, epsilon: float) -> int:
    """Returns an index of high utility, epsilon-DP for integer utilities that one record changes by at most
    `sensitivity`.

    McKenna and Sheldon (2020): in random order, each candidate r is accepted with probability exp(epsilon (u_r - max u)
    / (2 sensitivity)), here exactly. It is never worse than the exponential mechanism.
    """
    rate = Fraction(math.floor(Fraction(epsilon) * (1 << _SCALE_BITS)), 1 << _SCALE_BITS) / (2 * sensitivity)
    best = max(utilities)
    remaining = list(range(len(utilities)))
    while True:
        index = remaining.pop(int(uniform_below(stream, len(remaining), 1)[0]))
        # the utilities have a floor, which one record moves by no more than the best one; exp(-128) never happens
        whole, part = divmod(min(rate * (best - utilities[index]), Fraction(128)), 1)
        steps = np.ones(int(whole), dtype=np.int64)
        if bool(np.all(bernoulli_exp(stream, steps, 1))):
            one = np.array([part.numerator], dtype=np.int64)
            if bool(bernoulli_exp(stream, one, part.denominator)[0]):
                return index
