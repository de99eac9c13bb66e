"""The loops that read a weight beside its reference: exact halves, and sums that are upper bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from lipdp_lightning.bounds import deviations
from lipdp_lightning.bounds.deviations import distances, vector_norms
from lipdp_lightning.bounds.packed import subtract, wide
from lipdp_lightning.bounds.references import (
    Reference,
    bits,
    closer,
    difference,
    is_packed,
    is_single,
    reference_of,
)


class Unrounded(Reference):
    """Claims that no product is rounded."""

    @property
    def norm(self) -> float:
        return 0.0


def halves(
    values: Tensor, factor: float, detail: Reference | None = None, kind: type[Reference] = Reference
) -> Reference:
    norm = float(torch.linalg.vector_norm(values.double())) * (1 + 1e-12)
    return kind(values, norm, factor, torch.float32, detail)


def test_every_finite_half_is_read_exactly() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.int16)
    finite = every[np.isfinite(every.view(np.float16))]
    read = np.array([wide(half) for half in finite])
    assert np.array_equal(read.view(np.int64), finite.view(np.float16).astype(np.float64).view(np.int64))
    out = np.empty(len(finite), dtype=np.float32)
    subtract.alone(np.zeros(len(finite), dtype=np.float32), finite, -1.0, finite, 0.0, out)
    assert np.array_equal(out, finite.view(np.float16).astype(np.float32))


def test_differences_are_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    coarse, detail = torch.randn(2, 1000, generator=generator).half()
    reference = halves(coarse, 0.7, halves(detail, 0.01))
    weight = torch.randn(1000, generator=generator)
    out = np.empty(1000, dtype=np.float32)
    subtract.alone(weight.numpy(), *bits(reference), out)
    exact = weight.double() - 0.7 * coarse.double() - 0.01 * detail.double()
    assert np.array_equal(out, exact.float().numpy())


Number = type[np.float16] | type[np.float32]


def low_bounds(kind: type[Reference], number: Number, count: int = 400) -> int:
    """Of one by one weights next to a scaled value and its detail, where the difference is all but cancelled."""
    generator = np.random.default_rng(0)
    low = 0
    for _ in range(count):
        half, small = number(generator.uniform(1, 2)), number(generator.uniform(1, 2))
        factor, of_detail = generator.uniform(0.5, 1.0), generator.uniform(0.5, 1.0) * 2.0**-20
        weight = np.float32(factor * float(half) + of_detail * float(small))
        reference = halves(torch.tensor([half]), factor, halves(torch.tensor([small]), of_detail), kind)
        exact = Fraction(float(weight)) - Fraction(factor) * Fraction(float(half))
        exact = abs(exact - Fraction(of_detail) * Fraction(float(small)))
        assert (is_packed if number is np.float16 else is_single)(torch.tensor([weight]), reference)
        low += Fraction(distances([torch.tensor([weight])], [reference])[0]) < exact
    return low


@pytest.mark.parametrize("number", [np.float16, np.float32])
def test_rounding_is_covered(number: Number) -> None:
    assert low_bounds(Reference, number) == 0
    assert low_bounds(Unrounded, number) > 20


@pytest.mark.parametrize("exponent", [-40, -12, 0, 12, 30])
def test_without_a_product_the_rounding_is_that_of_one_subtraction(exponent: int) -> None:
    """Also where the difference has more digits than float64."""
    generator = np.random.default_rng(0)
    for _ in range(200):
        weight, value = (np.float32(generator.uniform(1, 2) * size) for size in (1.0, 2.0**exponent))
        reference = halves(torch.tensor([value]), 1.0)
        assert is_single(torch.tensor([weight]), reference)
        found = Fraction(distances([torch.tensor([weight])], [reference])[0])
        exact = abs(Fraction(float(weight)) - Fraction(float(value)))
        assert exact <= found <= exact * (1 + Fraction(1, 2**40))
    unmoved = torch.randn(37)
    assert distances([unmoved], [halves(unmoved.clone(), 1.0)]) == [0.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("length", [1, 7, 64, 513, 100_000])
def test_sums_are_those_of_all_entries(length: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(length)
    coarse = torch.randn(length, generator=generator).to(dtype)
    weight = torch.randn(length, generator=generator)
    for factor, detail in ((0.3, None), (0.3, halves(coarse.flip(0), 0.01))):
        left = weight.double() - factor * coarse.double()
        left = left if detail is None else left - 0.01 * detail.values.double()
        norm = float(torch.linalg.vector_norm(left))
        found = distances([weight], [halves(coarse, factor, detail)])[0]
        assert norm * (1 - 1e-13) <= found <= norm * (1 + 1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e30])
def test_squares_neither_underflow_nor_overflow(size: float, dtype: torch.dtype) -> None:
    weight = torch.full((600,), size)
    found = distances([weight], [halves(torch.zeros(600, dtype=dtype), 1.0)])[0]
    assert found == pytest.approx(float(weight[0]) * math.sqrt(600), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_bounded(value: float, dtype: torch.dtype) -> None:
    weight = torch.zeros(600)
    weight[17] = value
    assert not distances([weight], [halves(torch.zeros(600, dtype=dtype), 1.0)])[0] < math.inf


def test_other_layouts_and_dtypes_are_not_read_by_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are measured by torch, and as closely."""
    coarse = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).half()
    weight = coarse.float().mul(0.3) + 0.01
    laid_out = weight.t().contiguous().t()
    assert is_packed(weight, halves(coarse, 0.3)) and not is_packed(laid_out, halves(coarse, 0.3))
    assert not is_packed(weight.double(), halves(coarse, 0.3))
    assert is_single(weight, halves(coarse.float(), 0.3)) and not is_single(laid_out, halves(coarse.float(), 0.3))
    assert not is_single(weight, halves(coarse, 0.3)) and not is_packed(weight, halves(coarse.float(), 0.3))
    monkeypatch.setattr(deviations, "_in_one_pass", lambda weight, reference: math.nan)
    monkeypatch.setattr(deviations, "_squares_at", lambda places, factors: [math.nan])
    assert math.isnan(distances([weight], [halves(coarse.float(), 0.3)])[0])
    assert math.isnan(distances([weight], [halves(coarse, 0.3)])[0])
    assert distances([laid_out], [halves(coarse, 0.3)])[0] == pytest.approx(0.08, rel=1e-4)


def exact_square(vector: Tensor) -> Fraction:
    return sum((Fraction(float(v)) ** 2 for v in vector.flatten()), Fraction(0))


@pytest.mark.parametrize("layout", ["as they are", "every other entry", "negated", "float64", "bfloat16"])
def test_norms_of_vectors_are_upper_bounds_and_close(layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((1, 3.0), (64, 1e-3), (500, 1e12))
    vectors = [size * torch.randn(2 * count, generator=generator) for count, size in sizes]
    change: dict[str, Callable[[Tensor], Tensor]] = {
        "as they are": lambda v: v, "every other entry": lambda v: v[::2], "negated": torch._neg_view,
        "float64": lambda v: v.double(), "bfloat16": lambda v: v.bfloat16(),
    }  # fmt: skip
    own = [change[layout](v) for v in vectors]
    found = vector_norms(own)
    for norm, vector in zip(found, own, strict=True):
        exact = exact_square(vector)
        assert exact <= Fraction(norm) ** 2 <= exact * (1 + Fraction(1, 2**38))
    assert vector_norms([]) == [] and vector_norms([torch.zeros(3)]) == [0.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_norm_of_a_vector_that_is_not_finite_bounds_nothing(value: float) -> None:
    norms = vector_norms([torch.ones(3), torch.tensor([0.0, value])])
    assert norms[0] == pytest.approx(math.sqrt(3)) and not norms[1] < math.inf


def test_small_weights_get_the_same_norms_together_as_each_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(rows, 7, generator=generator) for rows in (1, 30, 5, 300)]
    references = [reference_of(w + 0.1 * torch.randn(w.shape, generator=generator)).scaled(0.9) for w in weights]
    references[1] = closer(references[1], difference(weights[1], references[1]) * 0.5)
    alone = [distances([w], [r])[0] for w, r in zip(weights, references, strict=True)]
    assert distances(weights, references) == alone and len(set(alone)) == 4
    view, reference = torch._neg_view(weights[0]), reference_of(-weights[0])
    assert distances([view], [reference])[0] == 0.0 < distances([weights[0]], [reference])[0]
