"""Function secret sharing: right everywhere, quick, and keys that look like noise."""

from __future__ import annotations

import time

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from lipdp_lightning.key_streams import CounterStream
from lipdp_lightning.privacy.keys import derive_key
from lipdp_lightning.studies.parties.function_keys import (
    KeyBatch,
    evaluate,
    from_bytes,
    generate,
    key_bytes,
    sum_everywhere,
    to_bytes,
)
from lipdp_lightning.studies.parties.ggm import FixedKeyGenerator

GENERATOR = FixedKeyGenerator(b"session")


def stream(*indices: int) -> CounterStream:
    return CounterStream(derive_key(bytes(16), "test", *indices))


def words(values: object) -> np.ndarray:
    return np.asarray(values, dtype=np.uint64)


def make(alphas, betas, levels, comparison, seed=0):
    return generate(GENERATOR, words(alphas), words(betas), levels, comparison, stream(seed))


@pytest.mark.parametrize("comparison", [True, False])
@pytest.mark.parametrize("levels", [1, 2, 3, 6])
def test_all_inputs_of_a_small_domain(levels: int, comparison: bool) -> None:
    size = 1 << levels
    alphas, points = words(np.repeat(np.arange(size), size)), words(np.tile(np.arange(size), size))
    betas = stream(7).uint64(size * size).astype(np.uint64)
    pair = [from_bytes(to_bytes(k), levels, comparison) for k in make(alphas, betas, levels, comparison)]
    total = evaluate(GENERATOR, 0, pair[0], points) + evaluate(GENERATOR, 1, pair[1], points)
    inside = points < alphas if comparison else points == alphas
    assert np.array_equal(total, np.where(inside, betas, 0))


def test_random_inputs_of_a_large_domain() -> None:
    rng = np.random.default_rng(0)
    alphas, points = (rng.integers(0, 1 << 32, 20_000, dtype=np.uint64) for _ in range(2))
    points[:5000] = alphas[:5000]  # the edge, and both sides of it
    points[5000:8000] = np.maximum(alphas[5000:8000], 1) - 1
    points[8000:10_000] = np.minimum(alphas[8000:10_000] + 1, (1 << 32) - 1)
    betas = rng.integers(0, 1 << 63, 20_000, dtype=np.uint64)
    for comparison in (True, False):
        k0, k1 = make(alphas, betas, 32, comparison)
        total = evaluate(GENERATOR, 0, k0, points) + evaluate(GENERATOR, 1, k1, points)
        assert np.array_equal(total, np.where(points < alphas if comparison else points == alphas, betas, 0))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.data())
def test_any_levels(levels: int, data: st.DataObject) -> None:
    number = st.integers(0, (1 << levels) - 1)
    alpha, point, beta = data.draw(number), data.draw(number), data.draw(st.integers(0, 2**64 - 1))
    k0, k1 = make([alpha], [beta], levels, True, levels)
    total = int((evaluate(GENERATOR, 0, k0, point) + evaluate(GENERATOR, 1, k1, point))[0])
    assert total == (beta if point < alpha else 0)


def test_every_point_at_once() -> None:
    alphas = np.random.default_rng(1).integers(0, 64, 300)
    k0, k1 = make(alphas, np.ones(300), 6, False)
    shares = sum_everywhere(GENERATOR, 0, k0), sum_everywhere(GENERATOR, 1, k1)
    assert np.array_equal(shares[0] + shares[1], np.bincount(alphas, minlength=64).astype(np.uint64))
    singly = words([evaluate(GENERATOR, 1, k1, x).sum(dtype=np.uint64) for x in range(64)])
    assert np.array_equal(shares[1], singly)


def test_other_session_keys_do_not_open() -> None:
    k0, k1 = make([40], [1], 6, True)
    other = FixedKeyGenerator(b"another")
    assert int((evaluate(other, 0, k0, 3) + evaluate(other, 1, k1, 3))[0]) != 1


def test_speed() -> None:
    count = 100_000
    k0, _ = make(np.arange(count), np.ones(count), 32, True)
    start = time.process_time()
    evaluate(GENERATOR, 0, k0, 12_345)
    assert time.process_time() - start < 2.0


def test_the_generator_is_the_documented_one() -> None:
    keys = derive_key(b"lipdp curves fixed keys", "matyas meyer oseas", b"session")
    seed = words([[0x0123456789ABCDEF, 0xFEDCBA9876543210]])
    children, values = GENERATOR.expand(seed, np.uint64(0), True)
    block = (0x0123456789ABCDEE).to_bytes(8, "little") + (0xFEDCBA9876543210).to_bytes(8, "little")
    for key, got in ((keys[:16], children.tobytes()), (keys[16:], None)):
        cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(block)
        expected = bytes(a ^ b for a, b in zip(cipher, block, strict=True))
        if got is not None:
            assert got == expected
        else:
            assert values is not None and values.tobytes() == expected[8:]


def uniform_bits(rows: np.ndarray) -> bool:
    """Each bit of the key a fair coin, and each byte's values uniform, over many keys."""
    count = rows.shape[0]
    z = (np.unpackbits(rows, axis=1).mean(axis=0) - 0.5) * 2 * np.sqrt(count)
    pairs = np.stack([np.bincount(column, minlength=256) for column in rows.T])
    statistic = ((pairs - count / 256) ** 2 / (count / 256)).sum(axis=1)
    return bool(np.abs(z).max() < 6 and statistic.max() < chi2.isf(1e-9, 255))


@pytest.mark.parametrize("comparison", [True, False])
@pytest.mark.parametrize("alpha", [0, 1, 32_768, 65_535])
def test_one_key_is_uniform_bytes_whatever_it_shares(alpha: int, comparison: bool) -> None:
    for beta in (0, 1):
        pair = make(np.full(8000, alpha), np.full(8000, beta), 16, comparison, alpha + beta)
        for keys in pair:
            rows = to_bytes(keys)
            assert rows.shape[1] == key_bytes(16, comparison)
            assert uniform_bits(rows)


def test_the_uniformity_test_sees_keys_that_are_not_masked() -> None:
    """Two broken generators: roots that are equal at both servers, and a final word without its mask."""
    k0, k1 = make(np.full(8000, 9), np.ones(8000), 16, True)
    both = np.concatenate([to_bytes(k0), to_bytes(k1)], axis=1)
    assert not uniform_bits(both[:, : key_bytes(16, True)] ^ both[:, key_bytes(16, True) :])  # corrections are shared
    bare = KeyBatch(k0.roots, k0.seeds, k0.right, k0.values, words(np.ones(8000)))
    assert not uniform_bits(to_bytes(bare))


def test_output_shares_are_uniform() -> None:
    """What a server adds is noise to whoever has no key, inside and outside of the interval."""
    k0, k1 = make(np.full(8000, 500), np.ones(8000), 16, True)
    for point in (0, 499, 500, 60_000):
        for server, keys in ((0, k0), (1, k1)):
            share = evaluate(GENERATOR, server, keys, point)
            assert uniform_bits(share.astype("<u8").view(np.uint8).reshape(-1, 8))


def test_lengths_depend_on_the_levels_alone() -> None:
    assert key_bytes(16, True) == 16 + 8 + 16 * 24 + 2
    k0, _ = make([1, 2], [1, 1], 16, True)
    with pytest.raises(ValueError, match="HINT"):
        from_bytes(to_bytes(k0)[:, :-1], 16, True)
    with pytest.raises(ValueError, match="HINT"):
        from_bytes(to_bytes(k0), 15, True)
