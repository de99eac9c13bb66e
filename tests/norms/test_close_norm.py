"""Norms by one float32 product and one proof, against float64 singular values; each margin is needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lipdp_lightning.norms import cholesky
from lipdp_lightning.norms import dense as room
from lipdp_lightning.norms.dense import close_norm, dense_norm

SHAPES = [(128, 128), (150, 700), (700, 150), (130, 3000)]


def truth(matrix: Tensor) -> float:
    return float(torch.linalg.svdvals(matrix.double())[0])


def noise(shape: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def orthogonal(shape: tuple[int, int]) -> Tensor:
    return torch.linalg.svd(noise(shape), full_matrices=False).U @ torch.linalg.svd(noise(shape, 1), False).Vh


def matrices() -> list[Tensor]:
    found = [noise(shape, seed) for shape in SHAPES for seed in range(3)]
    found += [noise((m, 1), 5) @ noise((1, n), 6) for m, n in SHAPES for _ in range(3)]
    found += [orthogonal(shape) for shape in SHAPES]
    return found + [noise((130, 200)) * size for size in (1e-12, 1e12, 1e-25, 1e25, 1e-42, 1e30)]


def violations(bound: Callable[[Tensor], float]) -> int:
    return sum(bound(m) < truth(m) * (1 - 1e-12) for m in matrices())


def test_never_below_the_truth_and_about_a_percent_above_it() -> None:
    assert violations(close_norm) == 0
    assert max(close_norm(m) / truth(m) for m in matrices() if truth(m) > 1e-30) <= 1.012


@pytest.fixture
def poor_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a start nearly orthogonal to the largest singular direction."""
    true = cholesky._suggested
    monkeypatch.setattr(cholesky, "_suggested", lambda grams, iterations: true(grams, 1))


@pytest.mark.usefixtures("poor_suggestion")
def test_a_poor_suggestion_costs_proofs_and_no_soundness() -> None:
    assert violations(close_norm) == 0


@pytest.mark.usefixtures("poor_suggestion")
def test_what_is_suggested_is_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "largest_eigenvalue", lambda grams, **how: cholesky._suggested(grams, 1))
    assert violations(close_norm) >= len(SHAPES)


@pytest.mark.usefixtures("poor_suggestion")
def test_a_level_that_is_believed_without_proof_is_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cholesky, "exceeding", lambda grams, level: torch.zeros(1, dtype=torch.bool))
    assert violations(close_norm) >= len(SHAPES)


def test_gamma_is_what_covers_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that is as far off as summation in some order may be, in the worst direction, proved closely."""
    genuine, worst = room._gram_in_pieces, 0.9

    def low(rows: Tensor, scale: float) -> tuple[Tensor, int]:
        _, terms = genuine(rows, scale)
        exact = (rows.double() * scale) @ (rows.double() * scale).mT
        return exact * (1.0 - worst * terms * 2.0**-24), terms

    monkeypatch.setattr(room, "_gram_in_pieces", low)
    exact_level = lambda grams, **how: float(torch.linalg.eigvalsh(grams[0])[-1]) * (1 + 2.0**-40)  # noqa: E731
    monkeypatch.setattr(room, "largest_eigenvalue", exact_level)
    rank_one = [noise((m, 1), 5) @ noise((1, n), 6) for m, n in SHAPES]
    assert all(close_norm(m) >= truth(m) for m in rank_one)
    monkeypatch.setattr(room, "_gram_in_pieces", lambda rows, scale: (low(rows, scale)[0], 0))
    assert all(close_norm(m) < truth(m) for m in rank_one)


def test_pieces_add_fewer_terms_one_after_the_other() -> None:
    _, terms = room._gram_in_pieces(noise((130, 3000)), 1.0)
    assert terms == 500 + 6


def test_where_float32_cannot_be_trusted_the_exact_norm_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    large = noise((200, 300))
    assert close_norm(large) > dense_norm(large)
    for matrix in (large.double(), large.bfloat16(), noise((5, 9)), torch.zeros(200, 200), torch.zeros(0, 7)):
        assert close_norm(matrix) == dense_norm(matrix)
    monkeypatch.setenv(room._ONEDNN_MODES[0], "BF16")
    assert close_norm(large) == dense_norm(large)


@pytest.mark.parametrize("entry", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(entry: float) -> None:
    matrix = noise((200, 300))
    matrix[3, 5] = entry
    with pytest.raises(ValueError, match=r"NaN or infinite"):
        close_norm(matrix)


def test_larger_matrices_are_measured_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounding of a float32 product grows with the rank: 1025 equal singular values would cost two percent."""
    monkeypatch.setattr(room, "_LONGEST_SIDE", 129)
    assert close_norm(noise((129, 200))) > dense_norm(noise((129, 200)))
    assert close_norm(noise((130, 200))) == dense_norm(noise((130, 200)))
