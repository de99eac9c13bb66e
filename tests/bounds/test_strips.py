"""Spectral norms of strips: upper bounds on the norm of a difference, for any shape and number of threads."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from lipdp_lightning.bounds import deviations, strips
from lipdp_lightning.bounds.deviations import distances
from lipdp_lightning.bounds.references import Reference, bits
from lipdp_lightning.bounds.strips import ROWS, largest_eigenvalue

SHAPES = [(1, 1), (8, 512), (7, 513), (9, 511), (40, 3), (64, 1100), (129, 31), (17, 4, 3, 3)]


def reference_to(shape: tuple[int, ...], detail: bool) -> Reference:
    generator = torch.Generator().manual_seed(1)
    coarse, more = torch.randn(2, *shape, generator=generator).half()
    own = Reference(more, float(more.double().norm()) * 1.001, 0.01, torch.float32) if detail else None
    return Reference(coarse, float(coarse.double().norm()) * 1.001, 0.75, torch.float32, own)


def matrix_of(reference: Reference) -> Tensor:
    own = reference.factor * reference.values.double()
    return own if reference.detail is None else own + matrix_of(reference.detail)


def differences(shape: tuple[int, ...]) -> list[Tensor]:
    """Of every rank, and in the last row and the last column alone."""
    generator = torch.Generator().manual_seed(0)
    columns = math.prod(shape[1:])
    noise = torch.randn(shape, generator=generator)
    line = torch.randn(shape[0], 1, generator=generator) @ torch.randn(1, columns, generator=generator)
    row, column = torch.zeros(2, shape[0], columns)
    row[-1], column[:, -1] = 1.0, torch.randn(shape[0], generator=generator)
    return [d.reshape(shape) for d in (noise, 1e-3 * noise, line, row, column)]


def cases() -> list[tuple[Tensor, Reference]]:
    found = []
    for shape in SHAPES:
        for detail in (False, True):
            reference = reference_to(shape, detail)
            found += [((matrix_of(reference) + d).float(), reference) for d in differences(shape)]
    return found


def exactly(weight: Tensor, reference: Reference) -> Tensor:
    return (weight.double() - matrix_of(reference)).flatten(1)


def low(bound: Callable[[Tensor, Reference], float]) -> int:
    return sum(bound(w, r) < float(torch.linalg.svdvals(exactly(w, r))[0]) * (1 - 1e-12) for w, r in cases())


def by_strips(weight: Tensor, reference: Reference) -> float:
    return distances([weight], [reference], [True])[0]


def test_never_below_the_spectral_norm_and_never_above_the_frobenius_norm() -> None:
    assert low(by_strips) == 0
    for weight, reference in cases():
        frobenius = float(exactly(weight, reference).norm())
        assert by_strips(weight, reference) <= frobenius * (1 + 1e-9) + 1e-11
        assert frobenius <= math.sqrt(8) * by_strips(weight, reference)


def test_the_largest_strip_alone_is_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = strips.square_norms

    class Largest:
        @staticmethod
        def shared(threads: int, *arguments: object) -> None:
            loop.shared(threads, *arguments)
            squares = arguments[-1]
            assert isinstance(squares, np.ndarray)
            squares[squares < squares.max()] = 0.0

    monkeypatch.setattr(strips, "square_norms", Largest)
    assert low(by_strips) >= 10


def test_noise_is_bounded_more_closely_than_by_its_frobenius_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = Reference(torch.zeros(128, 1024).half(), 0.0, 1.0, torch.float32)
    noise = torch.randn(128, 1024, generator=generator)
    assert by_strips(noise, reference) < float(noise.norm()) / 2.5
    assert by_strips(noise, reference) > float(torch.linalg.matrix_norm(noise, 2))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    weight, reference = torch.randn(67, 700, generator=torch.Generator().manual_seed(0)), reference_to((67, 700), True)
    coarse, factor, detail, of_detail = bits(reference)
    own = weight.numpy(), coarse.reshape(67, 700), factor, detail.reshape(67, 700), of_detail
    alone, shared = np.full(9, np.nan), np.full(9, np.nan)
    strips.square_norms.alone(*own, alone)
    strips.square_norms.shared(threads, *own, shared)
    assert np.array_equal(alone, shared) and np.isfinite(alone).all()


def test_eigenvalues_of_small_gram_matrices_are_bounded() -> None:
    generator = np.random.default_rng(0)
    power = np.empty((ROWS, ROWS))
    for rank in range(ROWS + 1):
        for size in (1e-80, 1.0, 1e70):
            factor = size * generator.normal(size=(ROWS, rank))
            gram = factor @ factor.T
            truth = np.linalg.eigvalsh(gram)[-1]
            found = largest_eigenvalue(np.tril(gram) + np.triu(np.full_like(gram, np.nan), 1), power)
            assert truth * (1 - 1e-13) <= found <= max(truth, 0) * 8 ** (1 / 32) * (1 + 1e-12)
    assert largest_eigenvalue(np.eye(ROWS), power) == pytest.approx(8 ** (1 / 32))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_bounded(value: float) -> None:
    weight = torch.zeros(30, 20)
    weight[17, 3] = value
    assert not by_strips(weight, reference_to((30, 20), False)) < math.inf


def test_what_no_loop_reads_and_vectors_are_measured_by_their_frobenius_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deviations, "_by_strips", lambda weight, reference: math.nan)
    vector = torch.ones(600)
    assert by_strips(vector, Reference(torch.zeros(600).half(), 0.0, 1.0, torch.float32)) == pytest.approx(600**0.5)
    matrix = torch.ones(8, 8)
    assert math.isnan(by_strips(matrix, Reference(torch.zeros(8, 8).half(), 0.0, 1.0, torch.float32)))
    assert by_strips(matrix, Reference(torch.zeros(8, 8), 0.0)) == pytest.approx(8.0, rel=1e-3)
