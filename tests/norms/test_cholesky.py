"""Largest eigenvalues proved by Cholesky factorisations, against an eigenvalue solver."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lipdp_lightning.norms import dense
from lipdp_lightning.norms.dense import TOLERANCE, exceeding, largest_eigenvalue


def gram(seed: int, count: int, side: int, inner: int, dtype: torch.dtype = torch.complex128) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(count, side, inner, generator=generator, dtype=dtype)
    return factors @ factors.mH / inner


def truth(grams: Tensor) -> float:
    return float(torch.linalg.eigvalsh(grams).max())


def batches() -> list[Tensor]:
    hidden = torch.zeros(3, 4, 4, dtype=torch.float64)
    hidden[0] = torch.eye(4)
    hidden[2, 3, 3] = 1.5
    return [
        *(gram(seed, 20, 12, 16) for seed in range(6)),
        *(gram(seed, 5, 1, 3, torch.float64) for seed in range(3)),
        gram(7, 3, 40, 2),
        torch.eye(9, dtype=torch.complex128).expand(4, -1, -1).contiguous(),
        hidden,
        gram(8, 2, 6, 6) * 1e-30,
    ]


def violations(bound: Callable[[Tensor], float]) -> list[float]:
    ratios = [bound(grams) / truth(grams) for grams in batches()]
    return [ratio for ratio in ratios if ratio < 1.0 - 1e-12]


def test_never_below_the_truth_and_close_to_it() -> None:
    assert violations(largest_eigenvalue) == []
    assert max(largest_eigenvalue(grams) / truth(grams) for grams in batches()) <= 1.0 + TOLERANCE + 1e-9


def test_the_suggestion_of_power_iteration_alone_fails_the_same_check() -> None:
    assert len(violations(lambda grams: dense._suggested(grams, 12))) >= 5


def too_low(grams: Tensor, iterations: int) -> float:
    """A poor suggestion, as power iteration gives from a start nearly orthogonal to the largest eigenvector."""
    return float(grams[:, 0, 0].real.max()) / 2.0


def test_levels_that_are_believed_without_proof_fail_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_suggested", too_low)
    assert violations(largest_eigenvalue) == []
    monkeypatch.setattr(dense, "exceeding", lambda grams, level: torch.zeros(len(grams), dtype=torch.bool))
    assert len(violations(largest_eigenvalue)) >= 5


def test_dropping_matrices_that_exceed_the_level_fails_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_only(grams: Tensor, level: float) -> Tensor:
        failed = exceeding(grams, level)
        failed[1:] = False
        return failed

    monkeypatch.setattr(dense, "_suggested", too_low)
    monkeypatch.setattr(dense, "exceeding", first_only)
    assert len(violations(largest_eigenvalue)) >= 3


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 9), st.integers(1, 12), st.floats(0.0, 4.0))
def test_floor_and_maximum(seed: int, count: int, side: int, floor: float) -> None:
    grams = gram(seed, count, side, 5)
    largest = max(floor, truth(grams))
    assert largest * (1 - 1e-12) <= largest_eigenvalue(grams, floor) <= largest * (1 + TOLERANCE + 1e-9)


@pytest.mark.parametrize("relative", [1e-3, 1e-6, 1e-9])
def test_a_level_just_below_the_largest_eigenvalue_is_not_accepted(relative: float) -> None:
    for seed in range(20):
        grams = gram(seed, 1, 24, 30)
        largest = truth(grams)
        assert bool(exceeding(grams, largest * (1.0 - relative)).all())
        assert not bool(exceeding(grams, largest * (1.0 + relative)).any())


def test_zero_matrices() -> None:
    zeros = torch.zeros(3, 5, 5, dtype=torch.complex128)
    assert largest_eigenvalue(zeros) < 1e-40
    assert largest_eigenvalue(zeros, 0.7) == 0.7


def test_neither_reads_nor_moves_the_global_generator() -> None:
    grams = gram(0, 4, 8, 8)
    torch.manual_seed(1)
    first, drawn = largest_eigenvalue(grams), float(torch.rand(()))
    torch.manual_seed(1)
    assert float(torch.rand(())) == drawn
    assert largest_eigenvalue(grams) == first
