"""Additive and Shamir shares: they open, and fewer than needed say nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lipdp_lightning.key_streams import CounterStream
from lipdp_lightning.privacy.keys import derive_key
from lipdp_lightning.studies.parties import (
    AdditiveSharing,
    FunctionSharing,
    Histogram,
    ShamirSharing,
    TableSharing,
    ThresholdCounts,
    TrustedCurator,
    VectorSum,
    run_in_memory,
    shamir,
)
from lipdp_lightning.studies.parties.additive import expand, split
from lipdp_lightning.studies.parties.secure_aggregation import ShareRandomness

P = shamir.PRIME
ELEMENT = st.integers(0, P - 1)
NO_NOISE = 1e6  # an epsilon at which the noise is zero but with probability exp(-10^4)
PROTOCOLS = [
    TrustedCurator(),
    AdditiveSharing(2),
    AdditiveSharing(5),
    AdditiveSharing(3, seeded=True),
    TableSharing(3),
    ShamirSharing(3, 2),
    ShamirSharing(5, 3),
    ShamirSharing(4, 4),
    FunctionSharing(),
]


def stream(*indices: int) -> CounterStream:
    return CounterStream(derive_key(bytes(16), "test", *indices))


def label(protocol: object) -> str:
    return f"{type(protocol).__name__}{getattr(protocol, 'servers', '')}"


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=label)
def test_every_protocol_opens_to_the_sum(protocol) -> None:
    rng = np.random.default_rng(3)
    records = np.stack([rng.integers(0, 256, 200), rng.integers(0, 2, 200)], axis=1)
    statistic = ThresholdCounts(8, (0, 17, 128, 254, 255))
    expected = [int(np.sum(records[:, 1] * (t < records[:, 0]))) for t in statistic.thresholds]
    assert run_in_memory(protocol, statistic, records, NO_NOISE).values.tolist() == expected
    bins = rng.integers(0, 32, 100)
    counted = run_in_memory(protocol, Histogram(5), bins, NO_NOISE).values
    assert np.array_equal(counted, np.bincount(bins, minlength=32))


@pytest.mark.parametrize("protocol", PROTOCOLS[:-1], ids=label)
def test_signed_vectors(protocol) -> None:
    vectors = np.random.default_rng(4).integers(-20, 21, (50, 4))
    outcome = run_in_memory(protocol, VectorSum(4, 80), vectors, NO_NOISE * 80)
    assert np.array_equal(outcome.values, vectors.sum(axis=0))


def test_function_sharing_refuses_vectors() -> None:
    with pytest.raises(ValueError, match="HINT"):
        run_in_memory(FunctionSharing(), VectorSum(2, 5), np.ones((3, 2), int), 1.0)


@settings(max_examples=300, deadline=None)
@given(ELEMENT, ELEMENT)
def test_field_product(a: int, b: int) -> None:
    for x, y in ((a, b), (P - 1, b), (a, P - 1), (P - 1, P - 1)):
        assert int(shamir.multiply(np.array([x], np.uint64), np.array([y], np.uint64))[0]) == x * y % P


@given(st.integers(0, 2**64 - 1))
def test_reduction(value: int) -> None:
    assert int(shamir.reduce(np.array([value], np.uint64))[0]) == value % P


def test_signed_encoding() -> None:
    values = np.array([0, 1, -1, P // 2, -(P // 2), 12_345, -(1 << 50)])
    assert np.array_equal(shamir.decode(shamir.encode(values)), values)


def test_any_threshold_many_servers_open() -> None:
    secret = shamir.encode(np.array([5, -7, 1 << 40]))
    coefficients = shamir.uniform(stream(1), 6).reshape(2, 3)
    shares = shamir.polynomial_shares(secret, coefficients, 5)
    protocol = ShamirSharing(5, 3)
    for opening in itertools.permutations(range(5), 3):
        got = protocol.combine(opening, {s: shares[s] for s in opening})
        assert got.tolist() == [5, -7, 1 << 40]


def coefficients_for(secret: int, points: list[int], values: list[int]) -> list[int]:
    """The polynomial with this constant term through the points: t - 1 equations, solved modulo p."""
    size = len(points)
    rows = [
        [pow(x, k, P) for k in range(1, size + 1)] + [(v - secret) % P] for x, v in zip(points, values, strict=True)
    ]
    for i in range(size):
        pivot = next(j for j in range(i, size) if rows[j][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        inverse = pow(rows[i][i], -1, P)
        rows[i] = [entry * inverse % P for entry in rows[i]]
        for j in range(size):
            if j != i:
                rows[j] = [(a - rows[j][i] * b) % P for a, b in zip(rows[j], rows[i], strict=True)]
    return [row[-1] for row in rows]


@settings(max_examples=50, deadline=None)
@given(ELEMENT, st.lists(ELEMENT, min_size=2, max_size=2), st.sampled_from(list(itertools.combinations(range(4), 2))))
def test_fewer_shares_than_the_threshold_fit_every_secret(
    secret: int, seen: list[int], servers: tuple[int, int]
) -> None:
    """For t = 3, whatever two servers see, each secret has exactly one pair of coefficients that explains it."""
    found = coefficients_for(secret, [s + 1 for s in servers], seen)
    shares = shamir.polynomial_shares(np.array([secret], np.uint64), np.array(found, np.uint64).reshape(2, 1), 4)
    assert [int(shares[s][0]) for s in servers] == seen


def test_a_polynomial_of_lower_degree_does_not_fit_every_secret() -> None:
    """The broken scheme with a zero leading coefficient: two shares determine the secret."""
    lines = shamir.polynomial_shares(shamir.encode(np.array([42])), np.array([[99], [0]], np.uint64), 4)
    weights = shamir.lagrange_at_zero([0, 1])
    assert sum(w * int(lines[s][0]) for s, w in weights.items()) % P == 42
    assert coefficients_for(43, [1, 2], [int(lines[0][0]), int(lines[1][0])])[1] != 0


def test_additive_shares_of_any_two_values_differ_by_a_bijection_of_the_coins() -> None:
    values = np.array([3, 2**64 - 1, 10], np.uint64)
    shares = split(values, 4, stream(2))
    assert np.array_equal(shares.sum(axis=0, dtype=np.uint64), values)
    moved = split(values + np.uint64(9), 4, stream(2))
    assert np.array_equal(moved[:3], shares[:3])  # three servers see the coins and nothing else
    assert np.array_equal(moved[3] - shares[3], np.full(3, 9, np.uint64))


def test_seeds_expand_to_different_words() -> None:
    seeds = np.arange(32, dtype=np.uint8).reshape(2, 16)
    first, second = expand(seeds, 4)
    assert not np.any(first == second)


def test_randomness_is_taken_once() -> None:
    randomness = ShareRandomness(bytes(16), b"session")
    randomness.stream()
    with pytest.raises(ValueError, match="difference"):
        randomness.stream()


@pytest.mark.parametrize(
    ("statistic", "records"),
    [
        (ThresholdCounts(4, (3,)), [[16, 1]]),
        (ThresholdCounts(4, (3,)), [[-1, 1]]),
        (ThresholdCounts(4, (3,)), [[3, 2]]),
        (ThresholdCounts(4, (3,)), np.empty((0, 2), int)),
        (ThresholdCounts(4, (3,)), [[0.5, 1.0]]),
        (Histogram(3), [8]),
        (VectorSum(2, 3), [[2, 2]]),
        (VectorSum(2, 3), [[-(2**63), 1]]),
    ],
)
def test_records_outside_of_what_is_declared(statistic, records) -> None:
    charges: list[object] = []
    with pytest.raises(ValueError, match="HINT"):
        run_in_memory(AdditiveSharing(2), statistic, records, 1.0, charge=charges.append)
    assert not charges


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), float("inf")])
def test_epsilon_must_be_positive(epsilon: float) -> None:
    charges: list[object] = []
    with pytest.raises(ValueError, match="HINT"):
        run_in_memory(AdditiveSharing(2), Histogram(2), [1, 2], epsilon, charge=charges.append)
    assert not charges


@pytest.mark.parametrize(
    "build",
    [
        lambda: AdditiveSharing(1),
        lambda: ShamirSharing(3, 1),
        lambda: ShamirSharing(3, 4),
        lambda: ThresholdCounts(33, (1,)),
        lambda: ThresholdCounts(3, (8,)),
        lambda: ThresholdCounts(3, ()),
        lambda: Histogram(17),
        lambda: VectorSum(0, 1),
        lambda: TableSharing(2).share(ThresholdCounts(20, (1,)), np.array([[1, 1]]), ShareRandomness(bytes(16), b"s")),
    ],
)
def test_what_is_not_offered(build) -> None:
    with pytest.raises(ValueError, match="HINT"):
        build()
