"""The keyed hash of tensors that is computed where they lie: lipdp_lightning/kernels/multilinear.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from lipdp_lightning.kernels.multilinear import (
    LEVELS,
    ROW,
    SUMS,
    key_table,
    multilinear_hash,
    row_sums_by_torch,
    rows_of,
)

KEY = bytes(range(32))
TABLE = key_table(KEY)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64]


def hashed(*tensors: Tensor) -> bytes:
    sums = multilinear_hash(tensors, TABLE)
    assert sums.shape == (SUMS,) and sums.dtype == torch.int64
    return sums.numpy().tobytes()


def by_integers(data: bytes, table: Tensor) -> list[int]:
    """The definition in Python's integers, which do not wrap."""
    words = np.frombuffer(data + bytes(-len(data) % 4), "<i4").tolist()
    for level in range(LEVELS):
        key, sums = table[level].tolist(), []
        rows = [words[start : start + ROW] for start in range(0, max(1, len(words)), ROW)]
        for row in rows:
            sums += [sum(k * x for k, x in zip(key[s], row, strict=False)) % (1 << 64) for s in range(SUMS)]
        if len(rows) == 1:
            return sums
        words = np.array(sums, dtype="<u8").view("<i4").tolist()
    raise AssertionError


@pytest.mark.parametrize("size", [1, 3, ROW, ROW + 1, 2 * ROW + 77])
def test_the_hash_is_that_of_the_definition(size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    expected = [number - (1 << 64) * (number >> 63) for number in by_integers(values.numpy().tobytes(), TABLE)]
    assert multilinear_hash([values], TABLE).tolist() == expected


def test_three_levels_are_taken_where_they_are_needed() -> None:
    small = 8  # words of a row: the sums of one row are 8 words, so the levels do not shrink below that
    rows = torch.randint(-(1 << 31), 1 << 31, (5, small)).int()
    order = torch.randperm(small)
    key = TABLE[0, :, :small]
    assert torch.equal(row_sums_by_torch(rows, key), row_sums_by_torch(rows[:, order], key[:, order]))
    assert len({hash(tuple(TABLE[level, s].tolist())) for level in range(LEVELS) for s in range(SUMS)}) == 12


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(5,), (ROW // 3, 5)], ids=str)
def test_every_bit_and_every_place_counts(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(0))
    values = (values > 0) if dtype == torch.bool else (values * 100).to(dtype)
    seen = [hashed(values), hashed(values, torch.ones(3)), hashed(torch.ones(3), values)]
    flat = values.view(-1).view(torch.uint8)
    for place in (0, len(flat) // 2, len(flat) - 1):
        changed = flat.clone()
        changed[place] ^= 1
        seen.append(hashed(changed.view(dtype).view(size)))
    seen.append(hashed(values.flip(0)))
    assert all(a != b for a, b in itertools.combinations(seen, 2))


def test_rows_may_not_change_places() -> None:
    """Every row has the same key: it is the next level that tells which row was which."""
    a, b = torch.randn(ROW), torch.randn(ROW)
    assert hashed(a, b) != hashed(b, a) and hashed(a, a) != hashed(a)
    assert hashed(torch.zeros(ROW), a) != hashed(a, torch.zeros(ROW))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.t().contiguous().t(),
    "every other column": lambda t: t.repeat_interleave(2, dim=1)[:, ::2],
    "negated": lambda t: torch._neg_view(-t),
    "a parameter": lambda t: torch.nn.Parameter(t.clone()),
    "within a longer tensor": lambda t: torch.cat([t.new_ones(1), t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_the_layout_in_memory_does_not_count(layout: str, dtype: torch.dtype) -> None:
    values = torch.randn(7, 9).to(dtype)
    assert hashed(LAYOUTS[layout](values)) == hashed(values)


def test_another_key_gives_another_hash_and_nothing_gives_zero_alone() -> None:
    values = torch.randn(100)
    other = multilinear_hash([values], key_table(bytes(32)))
    assert not torch.equal(other, multilinear_hash([values], TABLE))
    assert rows_of([torch.empty(0)]).shape == (1, ROW)
    assert hashed(torch.empty(0)) == bytes(32)  # which the headers of a digest tell from a tensor of zeros


def test_the_worst_difference_of_two_words_has_the_probability_that_is_proved() -> None:
    """In 8 bits for 4-bit words, where every key can be tried: at most 2^3 of 2^8 keys hide a difference."""
    bits, width = 8, 4
    worst = Fraction(0)
    for difference in range(1, 1 << width):
        for wanted in range(1 << bits):
            hiding = sum((key * difference - wanted) % (1 << bits) == 0 for key in range(1 << bits))
            worst = max(worst, Fraction(hiding, 1 << bits))
    assert worst == Fraction(1, 1 << (bits - width + 1))


def test_without_half_of_the_key_a_difference_is_hidden() -> None:
    """Why a word has 32 bits for keys of 64: of even keys, half the sums would not see the highest bit."""
    words = torch.zeros(1, ROW, dtype=torch.int32)
    changed = words.clone()
    changed[0, 0] = -(1 << 31)
    even = TABLE[0] << 33
    assert torch.equal(row_sums_by_torch(words, even), row_sums_by_torch(changed, even))
    assert not torch.equal(row_sums_by_torch(words, TABLE[0]), row_sums_by_torch(changed, TABLE[0]))
