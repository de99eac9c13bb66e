"""Frobenius norms of differences: upper bounds in every dtype, with the rounding of subtraction and scaling."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lipdp_lightning.bounds import deviations
from lipdp_lightning.bounds.deviations import distances
from lipdp_lightning.bounds.references import Reference, difference, reference_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; the loops of a CPU are tested in test_packed.py."""
    monkeypatch.setattr(deviations, "is_single", lambda weight, reference: False)


def exact(weight: Tensor, reference: Reference) -> float:
    """In float64; entries of one by one matrices are subtracted without error by integers."""
    difference = weight.double() - reference.factor * reference.values.double()
    return float(torch.linalg.vector_norm(difference))


def measured(weight: Tensor, reference: Reference) -> float:
    return distances([weight], [reference])[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 0.97, 1e-3])
@pytest.mark.parametrize("shape", [(1,), (3, 4), (511,), (512,), (513,), (40, 3, 3, 3), (700, 11)])
def test_never_below_the_truth_and_close(dtype: torch.dtype, factor: float, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    anchor = torch.randn(shape, generator=generator).to(dtype)
    reference = Reference(anchor, reference_of(anchor).frobenius, factor)
    weight = (factor * anchor.double() + 0.01 * torch.randn(shape, generator=generator).double()).to(dtype)
    norm = exact(weight, reference)
    assert norm * (1 - 1e-12) <= measured(weight, reference) <= norm * 1.001 + 1e-12


def scalar_violations(factor: float, shift: float = 2.0, count: int = 300) -> int:
    """One by one weights: the difference is known exactly, and a bound without margins is low half of the time."""
    generator = torch.Generator().manual_seed(0)
    low = 0
    for _ in range(count):
        anchor = torch.rand(1, 1, generator=generator) + 1.0
        weight = factor * anchor + shift * (torch.rand(1, 1, generator=generator) + 1.0)
        reference = Reference(anchor, float(anchor), factor)
        low += measured(weight, reference) < abs(float(weight) - factor * float(anchor)) * (1 - 1e-15)
    return low


@pytest.mark.parametrize("factor", [1.0, 0.7, 0.1])
@pytest.mark.parametrize("shift", [1e-6, 1e-3, 2.0])
def test_rounding_is_covered(factor: float, shift: float) -> None:
    assert scalar_violations(factor, shift) == 0


def test_scaling_without_its_rounding_fails_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "rounding", lambda self: 0.0)
    monkeypatch.setattr(deviations, "row_margin", lambda length, dtype: 6e-8)  # that of the subtraction alone
    assert scalar_violations(1.0) == 0
    assert scalar_violations(0.1, 1e-3) >= 10


def test_subtraction_without_its_rounding_fails_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deviations, "row_margin", lambda length, dtype: 0.0)
    assert scalar_violations(1.0) >= 10


@pytest.mark.parametrize("size", [1e-30, 1e-42])
def test_differences_whose_squares_underflow_are_counted(size: float) -> None:
    weight, reference = torch.full((8, 100), size), reference_of(torch.zeros(8, 100))
    norm = exact(weight, reference)
    assert norm <= measured(weight, reference) <= norm * 1.001


def test_nothing_moved_is_exactly_zero() -> None:
    weight = torch.randn(3, 700)
    assert measured(weight, reference_of(weight)) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_bounded(value: float) -> None:
    weight = torch.zeros(600)
    reference = reference_of(weight)
    weight[17] = value
    assert not measured(weight, reference) < math.inf


def test_each_weight_gets_its_own_norm_whatever_the_mix_of_dtypes() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, generator=generator).to(d) for n in (5, 600, 0, 1024) for d in DTYPES]
    references = [reference_of(torch.zeros_like(w)) for w in weights]
    norms = distances(weights, references)
    for norm, weight in zip(norms, weights, strict=True):
        assert norm == pytest.approx(float(torch.linalg.vector_norm(weight.double())), rel=1e-3)


def test_no_reference_for_another_dtype_or_an_extreme_factor() -> None:
    weight = torch.ones(3)
    for reference in (reference_of(weight.double()), Reference(weight, 2.0, 0.0), Reference(weight, 2.0, 1e-20)):
        assert distances([weight], [reference]) == [math.inf]


def test_no_reference_of_another_shape_though_it_would_broadcast() -> None:
    weight = torch.ones(4, 4)
    assert not reference_of(torch.ones(4, 1)).fits(weight)
    assert not reference_of(weight).fits(torch.ones(4, 1))


def test_channels_last_weights_are_read_by_position() -> None:
    weight = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    reference = reference_of(torch.zeros_like(weight))
    laid_out = weight.contiguous(memory_format=torch.channels_last)
    assert torch.equal(difference(laid_out, reference), weight)
    assert measured(laid_out, reference) == measured(weight, reference)


def test_parameters_that_require_gradients_are_only_read() -> None:
    parameter = torch.nn.Parameter(torch.randn(5, 5))
    reference = reference_of(parameter)
    assert not reference.values.requires_grad
    before = parameter.detach().clone()
    distances([parameter.detach()], [reference])
    assert torch.equal(parameter.detach(), before)
