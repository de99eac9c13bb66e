"""Standard normals in float64 from a key: lipdp_lightning/kernels/normals.py."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats

from lipdp_lightning.kernels import cpu
from lipdp_lightning.kernels.normals import normals, normals_by_torch
from lipdp_lightning.kernels.numeric_environment import numeric_environment
from lipdp_lightning.key_streams import CounterStream
from lipdp_lightning.privacy.digests import state_digest
from lipdp_lightning.privacy.keys import derive_key

SECRET = bytes(range(16))
KEY = derive_key(SECRET, "test")


def rotated(value: int, by: int) -> int:
    return ((value << by) | (value >> (32 - by))) & 0xFFFFFFFF


def chacha20_block(key: bytes, counter: int, nonce: bytes) -> bytes:
    """RFC 8439, section 2.3, as it is written there."""
    constants = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574]
    words = [int.from_bytes(part[i : i + 4], "little") for part in (key, nonce) for i in range(0, len(part), 4)]
    start = [*constants, *words[:8], counter, *words[8:]]
    state = list(start)

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for x, y, z, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            state[x] = (state[x] + state[y]) & 0xFFFFFFFF
            state[z] = rotated(state[z] ^ state[x], by)

    for _ in range(10):
        for column in range(4):
            quarter(column, column + 4, column + 8, column + 12)
        for column in range(4):
            quarter(column, (column + 1) % 4 + 4, (column + 2) % 4 + 8, (column + 3) % 4 + 12)
    return b"".join(((a + b) & 0xFFFFFFFF).to_bytes(4, "little") for a, b in zip(state, start, strict=True))


def test_the_block_function_is_that_of_the_standard() -> None:
    """The test vector of RFC 8439, section 2.3.2."""
    nonce = bytes.fromhex("000000090000004a00000000")
    expected = (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    assert chacha20_block(bytes(range(32)), 1, nonce).hex() == expected


def words_of(stream: int, first_block: int, blocks: int) -> torch.Tensor:
    data = b"".join(chacha20_block(KEY, first_block + i, stream.to_bytes(12, "little")) for i in range(blocks))
    return torch.from_numpy(np.frombuffer(data, dtype="<i8").copy())


def normals_from_words(words: torch.Tensor) -> torch.Tensor:
    """Pairs of words: first all radii, then all angles."""
    pairs, out = torch.stack(words.chunk(2), dim=1).flatten(), torch.empty(words.numel(), dtype=torch.float64)
    cpu.normals(pairs.numpy(), out.numpy())
    return torch.cat([out[0::2], out[1::2]])


@pytest.mark.parametrize("stream", [0, 3])
def test_normals_are_made_of_the_words_of_their_own_blocks(stream: int) -> None:
    words, out = words_of(stream, 5, 12), torch.empty(96, dtype=torch.float64)
    cpu.normals(words.numpy(), out.numpy())
    assert torch.equal(normals(KEY, stream, 40, 96), out)
    torch.testing.assert_close(normals_by_torch(words), out, rtol=1e-12, atol=1e-15)
    assert not torch.equal(normals(KEY, stream + 1, 40, 96), out)


@pytest.mark.parametrize("count", [1, 2, 15, 131_071, 131_073])
def test_any_part_of_a_stream_may_be_drawn(count: int) -> None:
    whole = normals(KEY, 0, 0, count)
    assert whole.dtype == torch.float64 and whole.device.type == "cpu" and whole.shape == (count,)
    for start in (0, 8, 800, 8 * (count // 16)):
        part = normals(KEY, 0, start, max(0, min(100, count - start)))
        assert torch.equal(part, whole[start : start + 100])


def test_normals_ignore_default_dtype_and_device() -> None:
    reference = CounterStream(KEY).normal(100)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            assert torch.equal(CounterStream(KEY).normal(100), reference)
    finally:
        torch.set_default_dtype(torch.float32)


def transform(radius_words: list[int], angle_words: list[int]) -> torch.Tensor:
    return normals_from_words(torch.tensor(radius_words + angle_words, dtype=torch.int64))


def test_extreme_words_give_finite_normals_beyond_eight() -> None:
    lowest, highest = -(1 << 63), (1 << 63) - 1
    words = [0, lowest, 1, highest, -1]
    grid = list(itertools.product(words, [*words, 1 << 62, -(1 << 62)]))
    values = transform([radius for radius, _ in grid], [angle for _, angle in grid])
    assert values.isfinite().all()
    assert values.max() == pytest.approx(math.sqrt(2 * 63 * math.log(2)), rel=1e-12)
    assert values.min() == pytest.approx(-values.max().item(), rel=1e-12)
    assert transform([highest], [0])[0] == 0.0  # u = 1, not log(0)


def sample_words() -> npt.NDArray[np.int64]:
    """Random ones, and such that u is near 1 and near 2^-63 and angles are near the edges of quadrants and octants."""
    words = CounterStream(KEY).uint64(1 << 15).view(np.int64).reshape(2, -1).copy()
    words[0, :4096] >>= np.arange(4096) % 64
    words[0, 4096:8192] = (1 << 63) - 1 - (words[0, 4096:8192] & ((1 << 62) - 1) >> np.arange(4096) % 62)
    edges = ((np.arange(4096, dtype=np.uint64) % 8) << 61).view(np.int64)
    words[1, :4096] = edges + (words[1, :4096] >> 3 + np.arange(4096) % 61)
    return words


def error_of_box_muller(transform: Callable[..., None]) -> float:
    """Largest difference from r cos(a) and r sin(a) in extended precision, over r and what rounding u does to r."""
    words = sample_words()
    out = np.empty(words.size)
    transform(words.reshape(-1), out)
    uniform = np.sqrt(words[0].astype(np.longdouble) ** 2 + 1) / np.longdouble(2**63)
    angle = words[1].astype(np.longdouble) * (np.arctan(np.longdouble(1)) * 4 / np.longdouble(2**63))
    radius = np.sqrt(-2 * np.log(uniform))
    exact = np.stack([radius * np.cos(angle), radius * np.sin(angle)])
    with np.errstate(divide="ignore"):
        return float((np.abs(out.reshape(2, -1) - exact) / (radius + 0.1 / radius)).max())


def rows_of_one(words: npt.NDArray[np.int64], out: npt.NDArray[np.float64]) -> None:
    """The compiled loop on words of which the first half are radii."""
    out[:] = normals_from_words(torch.from_numpy(words)).numpy()


def recompiled() -> Callable[..., None]:
    """The loop with the constants that its module has now, kept nowhere."""
    signature = "void(int64[::1], int64[::1], float64[::1], float64[::1])"
    pairs = numba.njit(signature, error_model="numpy")(cpu.transform_pairs)
    return lambda words, out: pairs(*halves(words), *halves(out))


def halves(row: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    return row[: len(row) // 2], row[len(row) // 2 :]


def test_normals_are_those_of_box_muller_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_of_box_muller(rows_of_one) < 2e-15
    for name, value in [("_RADIANS", np.float32(math.pi).item() * 2.0**-63), ("_LN2_REST", 0.0), ("_L11", 0.0)]:
        with monkeypatch.context() as broken:
            broken.setattr(cpu, name, value)
            assert error_of_box_muller(recompiled()) > 1e-11


def rounded_once(a: float, b: float, c: float) -> np.float64:
    return np.float64(float(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))))


def test_compiled_loops_round_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the bits of noise would depend on the processor."""
    words = np.ascontiguousarray(sample_words()[:, ::64]).reshape(-1)
    compiled, interpreted = np.empty((2, words.size))
    rows_of_one(words, compiled)
    for fma, alike in ((rounded_once, True), (lambda a, b, c: a * b + c, False)):
        monkeypatch.setattr(cpu, "_fma", fma)
        with np.errstate(over="ignore"):
            cpu.transform_pairs(*halves(words), *halves(interpreted))
        assert np.array_equal(compiled, interpreted) is alike


def largest_of_53_bits() -> float:
    return transform([0], [0])[0].item()


def largest_of_torch_fp32() -> float:
    """Box-Muller on the extreme uniform of torch's fp32 generator, whose uniforms are multiples of 2^-24."""
    uniforms = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniforms * 2**24, (uniforms * 2**24).round()) and uniforms.max() < 1
    extreme = torch.tensor(1 - 2.0**-24)
    return torch.sqrt(-2 * torch.log(1 - extreme)).item()


def reaches_the_tail(largest: Callable[[], float]) -> bool:
    return largest() > 8.5


def test_tail_support_exceeds_that_of_fp32() -> None:
    assert reaches_the_tail(largest_of_53_bits)
    assert not reaches_the_tail(largest_of_torch_fp32)
    assert 5.7 < largest_of_torch_fp32() < 5.8


def test_values_beyond_5_77_have_the_normal_probability() -> None:
    """Conditionally on u < 2^-20, that is r > 5.27: rare events at their true rate, 8.3e-3 of the draws."""
    half = 500_000
    words = torch.from_numpy(CounterStream(KEY).uint64(2 * half).view(np.int64).copy())
    words[:half] &= (1 << 43) - 1
    out = normals_from_words(words)
    for threshold in (5.3, 5.77, 6.3):
        expected = 2 * stats.norm.sf(threshold) * 2**20 * out.numel()
        for sign in (1, -1):
            count = int((sign * out > threshold).sum())
            assert abs(count - expected / 2) < 4 * math.sqrt(expected / 2)


def test_normals_pass_ks_variance_and_moderate_tails() -> None:
    sample = CounterStream(KEY).normal(2_000_000)
    assert stats.kstest(sample.numpy(), "norm").pvalue > 1e-3
    assert abs(sample.mean().item()) < 4 / math.sqrt(2e6)
    assert abs(sample.var().item() - 1) < 4 * math.sqrt(2 / 2e6)
    assert abs((sample**4).mean().item() - 3) < 4 * math.sqrt(96 / 2e6)
    for threshold in (3.0, 4.0):
        expected = 2 * stats.norm.sf(threshold) * 2e6
        assert abs(int((sample.abs() > threshold).sum()) - expected) < 4 * math.sqrt(expected)
    half = 1 << 16
    first, second = sample[:half], sample[half : 2 * half]  # the cosines and sines of the same radii
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1].item()) < 4 / math.sqrt(half)
    assert abs(torch.corrcoef(torch.stack([first**2, second**2]))[0, 1].item()) < 4 / math.sqrt(half)


@pytest.mark.slow
def test_large_draw_has_values_beyond_5_77() -> None:
    beyond = 0
    stream = CounterStream(KEY)
    for _ in range(100):
        beyond += int((stream.normal(10_000_000).abs() > 5.77).sum())
    expected = 2 * stats.norm.sf(5.77) * 1e9
    assert abs(beyond - expected) < 4 * math.sqrt(expected) and beyond > 0


def test_digest_names_the_numeric_environment() -> None:
    assert torch.__version__.encode() in numeric_environment()
    weights = {"weight": torch.ones(3)}
    assert state_digest(weights, numeric_environment()) != state_digest(weights)
