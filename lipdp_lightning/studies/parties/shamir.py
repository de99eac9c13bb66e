"""Implements Shamir sharing over the field of p = 2^61 - 1 elements: any `threshold` servers open, fewer
know nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from lipdp_lightning.key_streams import CounterStream
from lipdp_lightning.studies.parties.additive import check_servers
from lipdp_lightning.studies.parties.kernel_sums import UStatistic
from lipdp_lightning.studies.parties.secure_aggregation import (
    Bytes,
    IntArray,
    SecureAggregation,
    ShareRandomness,
    Words,
    as_rows,
    as_words,
)

PRIME = (1 << 61) - 1
_P, _SHIFT = np.uint64(PRIME), np.uint64(61)
_LOW_31, _LOW_30 = np.uint64((1 << 31) - 1), np.uint64((1 << 30) - 1)
_31, _30, _1 = np.uint64(31), np.uint64(30), np.uint64(1)


def reduce(values: Words) -> Words:
    """Returns any 64-bit words modulo p, using 2^61 = 1."""
    folded = (values & _P) + (values >> _SHIFT)
    return np.where(folded >= _P, folded - _P, folded)


def multiply(left: Words, right: Words | np.uint64) -> Words:
    """Returns the product modulo p of numbers below p, in 64-bit words: the factors are cut at bit 31, and 2^61 = 1."""
    a, b, c, d = left >> _31, left & _LOW_31, right >> _31, right & _LOW_31
    middle = a * d + b * c  # below 2^62
    # a c 2^62 = 2 a c; middle 2^31 = (its upper bits) + (its lower 30 bits) 2^31; all three below 2^62
    return reduce(reduce((a * c) << _1) + reduce((middle >> _30) + ((middle & _LOW_30) << _31)) + reduce(b * d))


def uniform(stream: CounterStream, count: int) -> Words:
    """Returns uniform field elements: 61 bits of each word, with p itself rejected."""
    out = np.empty(0, dtype=np.uint64)
    while out.size < count:
        words = stream.uint64(count - out.size) & _P
        out = np.concatenate([out, words[words != _P]])
    return out


def encode(values: IntArray) -> Words:
    """Returns signed integers as field elements."""
    return np.mod(values, PRIME).astype(np.uint64)


def decode(elements: Words) -> IntArray:
    """Inverts `encode` for |value| < p / 2."""
    values = elements.astype(np.int64)
    return np.where(values > PRIME // 2, values - PRIME, values)


def polynomial_shares(secret: Words, coefficients: Words, servers: int) -> Words:
    """Returns P(1), ..., P(servers) of P(y) = secret + sum_k coefficients[k-1] y^k."""
    shares = []
    for point in range(1, servers + 1):
        value = np.zeros_like(secret)
        for coefficient in coefficients[::-1]:
            value = multiply(reduce(value + coefficient), np.uint64(point))
        shares.append(reduce(value + secret))
    return np.stack(shares)


def lagrange_at_zero(opening: Sequence[int]) -> dict[int, int]:
    """Returns per opening server (number j stands at point j + 1) its weight in P(0)."""
    weights = {}
    for server in opening:
        weight = 1
        for other in opening:
            if other != server:
                weight = weight * (other + 1) * pow(other - server, -1, PRIME) % PRIME
        weights[server] = weight
    return weights


class ShamirSharing(SecureAggregation):
    """Shares t-out-of-m: servers lost before the opening do no harm as long as t are left; t - 1 may pool their views.

    Noise needs no further round: server j in the opening set adds eta_j / lambda_j to its share, lambda_j its Lagrange
    weight, so the t answers open to the sum plus all eta_j. A server answers for one opening set only, since the
    difference of two answers would reveal its noise.
    """

    name: ClassVar[str] = "shamir"

    def __init__(self, servers: int = 3, threshold: int = 2) -> None:
        check_servers("Shamir sharing", servers)
        if not 2 <= threshold <= servers:
            raise ValueError(
                f"a threshold of {threshold} among {servers} servers protects nothing, or cannot be opened.\n"
                f"HINT: use a threshold of 2 to {servers}."
            )
        self.servers, self.threshold = servers, threshold

    @property
    def coalition(self) -> int:
        return self.threshold - 1

    @property
    def openers(self) -> int:
        return self.threshold

    def message_bytes(self, server: int, statistic: UStatistic) -> int:
        return 8 * statistic.length

    def share(self, statistic: UStatistic, records: IntArray, randomness: ShareRandomness) -> list[Bytes]:
        secret = encode(statistic.contributions(records))
        drawn = uniform(randomness.stream(), (self.threshold - 1) * secret.size)
        coefficients = drawn.reshape(self.threshold - 1, *secret.shape)
        return [as_rows(share) for share in polynomial_shares(secret, coefficients, self.servers)]

    def collect(self, server: int, statistic: UStatistic, session: bytes, messages: Bytes) -> Any:
        shares = as_words(messages)
        while shares.shape[0] > 1:  # in halves: sums of two elements fit in a word
            half = (shares.shape[0] + 1) // 2
            rest = shares[half:]
            shares = np.concatenate([reduce(shares[: rest.shape[0]] + rest), shares[rest.shape[0] : half]])
        return reduce(shares[0])

    def answer(self, server: int, statistic: UStatistic, state: Any) -> Words:
        return np.asarray(state, dtype=np.uint64)

    def add_noise(self, server: int, answer: Words, noise: IntArray, opening: Sequence[int]) -> Words:
        inverse = np.uint64(pow(lagrange_at_zero(opening)[server], -1, PRIME))
        return reduce(answer + multiply(encode(noise), inverse))

    def combine(self, opening: Sequence[int], answers: Mapping[int, Words]) -> IntArray:
        total = np.zeros_like(answers[opening[0]])
        for server, weight in lagrange_at_zero(opening).items():
            total = reduce(total + multiply(reduce(answers[server]), np.uint64(weight)))
        return decode(total)
