"""Dense norms: upper bounds at every scale, dtype and rank, against the singular value decomposition."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lipdp_lightning.norms import dense_norm
from lipdp_lightning.norms.dense import largest_norm, spectral_norms


def truth(matrix: Tensor) -> float:
    return float(torch.linalg.svdvals(matrix.double())[0])


def violations(bound: Callable[[Tensor], float], matrices: list[Tensor]) -> list[float]:
    """Ratios of bound to truth below 1, beyond the truth's own rounding."""
    ratios = [bound(m) / truth(m) for m in matrices]
    return [ratio for ratio in ratios if ratio < 1.0 - 1e-13]


def matrices() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 1), (1, 7), (7, 1), (5, 5), (40, 12), (12, 40), (64, 64), (10, 300)]
    dense = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    orthogonal = torch.linalg.qr(dense[6])[0]
    low_rank = dense[4][:, :1] @ dense[5][:1]
    two_close = torch.diag(torch.tensor([1.0, 1.0 - 1e-9, 0.5], dtype=torch.float64))
    return [*dense, orthogonal, low_rank, two_close, *(d.float() for d in dense), *(d.bfloat16() for d in dense)]


def few_step_power_iteration(matrix: Tensor) -> float:
    matrix = matrix.double()
    vector = torch.ones(matrix.shape[1], dtype=torch.float64)
    for _ in range(3):
        vector = matrix.T @ (matrix @ vector)
        vector = vector / vector.norm()
    return float((matrix @ vector).norm())


def unsolved(*arguments: object) -> Tensor:
    raise torch.linalg.LinAlgError  # type: ignore[attr-defined]


@pytest.mark.parametrize("solver", [torch.linalg.eigvalsh, unsolved])
def test_never_below_the_truth_and_close_to_it(solver: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that does not converge costs closeness and no soundness."""
    monkeypatch.setattr(torch.linalg, "eigvalsh", solver)
    assert violations(dense_norm, matrices()) == []
    assert max(dense_norm(m) / truth(m) for m in matrices()) <= (1.001 if solver is unsolved else 1 + 1e-10)


def test_power_iteration_fails_the_same_check() -> None:
    assert len(violations(few_step_power_iteration, matrices())) > 3


def test_norm_without_margin_in_float32_fails_the_same_check() -> None:
    generator = torch.Generator().manual_seed(1)
    many = [torch.randn(30, 30, generator=generator) for _ in range(20)]
    assert violations(lambda m: float(torch.linalg.matrix_norm(m, 2)), many)
    assert violations(dense_norm, many) == []


@pytest.mark.parametrize("size", [8, 256])
def test_orthogonal_matrices(size: int) -> None:
    orthogonal = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]
    assert 1.0 <= dense_norm(orthogonal) * (1 + 1e-13) <= 1.0 + 1e-8


@pytest.mark.parametrize("exponent", [-1000, -600, -300, 300, 600, 1000])
def test_neither_overflow_nor_underflow(exponent: int) -> None:
    base = torch.randn(6, 9, dtype=torch.float64)
    scaled = torch.ldexp(base, torch.tensor(exponent, dtype=torch.float64))
    assert dense_norm(scaled) == pytest.approx(math.ldexp(dense_norm(base), exponent), rel=1e-9)


def test_entries_of_very_different_size() -> None:
    matrix = torch.diag(torch.tensor([1e-200, 1e-160, 1e-30], dtype=torch.float64))
    assert dense_norm(matrix) == pytest.approx(1e-30, rel=1e-9)
    assert dense_norm(matrix) >= 1e-30


def test_smallest_subnormal_is_not_lost() -> None:
    assert dense_norm(torch.full((1, 1), 5e-324, dtype=torch.float64)) >= 5e-324


def test_zero_is_zero() -> None:
    assert dense_norm(torch.zeros(3, 4)) == 0.0
    assert dense_norm(torch.zeros(0, 4)) == 0.0


def test_the_norms_of_a_batch_are_those_of_its_matrices() -> None:
    stack = torch.randn(2, 3, 4, 7, dtype=torch.float64)
    stack[0, 1] = 0.0
    stack[1, 2] *= 1e-100
    norms = spectral_norms(stack)
    assert norms.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            assert float(norms[i, j]) == pytest.approx(dense_norm(stack[i, j]), rel=1e-13, abs=0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_weight_is_refused_by_name(value: float) -> None:
    weight = torch.ones(3, 3)
    weight[1, 2] = value
    with pytest.raises(ValueError, match=r"(?s)encoder\.fc1.*HINT"):
        dense_norm(weight, name="encoder.fc1")


@pytest.mark.parametrize("weight", [torch.ones(3), torch.ones(2, 3, 4), torch.ones(2, 2, dtype=torch.int64)])
def test_what_is_no_real_matrix_is_refused(weight: Tensor) -> None:
    with pytest.raises(ValueError, match="HINT"):
        dense_norm(weight)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 12), st.integers(1, 9), st.booleans(), st.floats(0.0, 3.0))
def test_largest_of_a_batch_brackets_the_truth(seed: int, count: int, side: int, ties: bool, floor: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(count, side, 5, generator=generator, dtype=torch.complex128) / 4
    if ties:
        batch = torch.linalg.qr(torch.randn(count, 5, 5, generator=generator, dtype=torch.complex128))[0]
    if seed % 3 == 0:
        batch[0] = 0.0
    largest = max(floor, float(torch.linalg.svdvals(batch).max()))
    found = largest_norm(batch, floor=floor)
    assert largest * (1 - 1e-12) <= found <= largest * 1.001 + 1e-12
