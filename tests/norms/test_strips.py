"""The strip bound: never below the spectral norm of a change, rounding included; each margin is needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lipdp_lightning.norms import strips
from lipdp_lightning.norms.operators import frobenius_norm
from lipdp_lightning.norms.strips import STRIP, Bounds, Reference, changes

SHAPES = [(1, 1), (STRIP, 512), (STRIP - 1, 513), (STRIP + 1, 511), (40, 3), (64, 1100), (129, 31), (17, 4, 3, 3)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference(values: Tensor, factor: float = 1.0) -> Reference:
    return Reference(values, Bounds({}, {}, frobenius_norm(values)), factor)


def differences(shape: tuple[int, ...]) -> list[Tensor]:
    """Noise, a matrix of rank one, one row, one column, one strip alone, and next to nothing."""
    columns = math.prod(shape[1:])
    line = noise(shape[0], 1, seed=1) @ noise(1, columns, seed=2)
    row, column, strip = torch.zeros(3, shape[0], columns)
    row[-1], column[:, -1] = 1.0, noise(shape[0])
    strip[-STRIP:] = noise(*strip[-STRIP:].shape)
    return [d.reshape(shape) for d in (noise(*shape), 1e-6 * noise(*shape), line, row, column, strip)]


def cases(dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Reference]]:
    found = []
    for shape in SHAPES:
        for factor in (1.0, 0.7):
            earlier = reference(noise(*shape, seed=3).to(dtype), factor)
            found += [((factor * earlier.values.double() + d).to(dtype), earlier) for d in differences(shape)]
    return found


def exact(weight: Tensor, earlier: Reference) -> Tensor:
    return (weight.double() - earlier.factor * earlier.values.double()).flatten(1)


def spectral(weight: Tensor, earlier: Reference) -> float:
    return changes([(weight, earlier)])[0][0].spectral


def low(bound: Callable[[Tensor, Reference], float], dtype: torch.dtype = torch.float32) -> int:
    """How many bounds are below the spectral norm."""
    return sum(bound(w, r) < float(torch.linalg.svdvals(exact(w, r))[0]) * (1 - 1e-12) for w, r in cases(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("height", [1, STRIP, 128])
def test_never_below_the_spectral_norm(height: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strips, "STRIP", height)
    assert low(spectral, dtype) == 0


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where one strip has all rows."""
    monkeypatch.setattr(strips, "_has_all_rows", lambda device: True)


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_strip_of_all_rows_is_never_below_the_spectral_norm(dtype: torch.dtype) -> None:
    assert low(spectral, dtype) == 0
    for weight, earlier in cases(dtype):
        frobenius = float(exact(weight, earlier).norm())
        assert changes([(weight, earlier)])[0][0].frobenius >= frobenius * (1 - 1e-12)


@pytest.mark.usefixtures("whole")
def test_noise_is_bounded_more_closely_than_by_its_frobenius_norm_by_one_strip() -> None:
    change, still = noise(256, 1024), reference(torch.zeros(256, 1024))
    assert spectral(change, still) < float(change.norm()) / 3.5


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("factor", [1.0, 0.7, 0.1])
@pytest.mark.parametrize("shift", [1e-6, 1e-3, 2.0])
def test_rounding_is_covered_for_one_strip(factor: float, shift: float) -> None:
    assert scalar_violations(factor, shift) == 0


def test_not_above_the_frobenius_norm_by_more_than_what_the_root_costs() -> None:
    for weight, earlier in cases():
        change, frobenius = changes([(weight, earlier)])[0][0], float(exact(weight, earlier).norm())
        rounding = 1e-5 * (1 + earlier.bounds.frobenius)
        assert frobenius <= change.frobenius <= frobenius * (1 + 1e-3) + rounding
        assert change.spectral <= frobenius * STRIP ** (1 / 32) * (1 + 1e-3) + rounding


def test_the_largest_strip_alone_is_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strips, "_total", max)
    assert low(spectral) >= 10


def test_noise_is_bounded_more_closely_than_by_its_frobenius_norm() -> None:
    change, still = noise(256, 1024), reference(torch.zeros(256, 1024))
    norm, frobenius = float(torch.linalg.matrix_norm(change, 2)), float(change.norm())
    assert norm < spectral(change, still) / 1.5 < frobenius / 3.5


def scalar_violations(factor: float, shift: float) -> int:
    """One by one matrices, where nothing but the margins is left over."""
    generator, count = torch.Generator().manual_seed(0), 0
    for _ in range(200):
        earlier = torch.rand(1, 1, generator=generator)
        weight = (factor * earlier.double() + shift * (0.5 + torch.rand(1, 1, generator=generator))).float()
        count += spectral(weight, reference(earlier, factor)) < float(exact(weight, reference(earlier, factor)).abs())
    return count


@pytest.mark.parametrize("factor", [1.0, 0.7, 0.1])
@pytest.mark.parametrize("shift", [1e-6, 1e-3, 2.0])
def test_rounding_is_covered(factor: float, shift: float) -> None:
    assert scalar_violations(factor, shift) == 0


def test_the_scaled_reference_without_its_rounding_fails_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = strips._bounds

    def forgetful(top: float, trace: float, weight: Tensor, earlier: Reference, *others: Any) -> strips.Change:
        return genuine(top, trace, weight, Reference(earlier.values, Bounds({}, {}, 0.0), earlier.factor), *others)

    monkeypatch.setattr(strips, "_bounds", forgetful)
    assert scalar_violations(0.1, 1e-6) >= 10


def test_gamma_is_what_covers_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that are as far off as summation in some order may be, and in the worst direction."""
    genuine, worst = strips._grams, 0.9

    def low_products(weight: Tensor, earlier: Reference, dtype: torch.dtype) -> Tensor:
        exact_products = genuine(weight.double(), reference(earlier.values.double()), torch.float64)
        return exact_products * (1.0 - worst * weight.shape[1] * 2.0**-24)

    wide = [(noise(1, n, seed=n), reference(torch.zeros(1, n))) for n in (400, 4000, 40000)]
    monkeypatch.setattr(strips, "_grams", low_products)
    whole = lambda pairs, dtypes: [low_products(*pair, dtypes[0]).norm() for pair in pairs]  # noqa: E731
    monkeypatch.setattr(strips, "_as_a_whole", whole)
    for all_rows in (False, True):
        monkeypatch.setattr(strips, "_has_all_rows", lambda device, all_rows=all_rows: all_rows)
        assert all(spectral(w, r) >= float(w.double().norm()) for w, r in wide)
    monkeypatch.setattr(torch, "finfo", lambda dtype: type("", (), {"eps": 1e-12, "smallest_normal": 0.0}))
    assert all(spectral(w, r) < float(w.double().norm()) for w, r in wide)


@pytest.mark.parametrize("size", [1e-30, 1e-42])
def test_differences_whose_squares_underflow_are_counted(size: float) -> None:
    weight = torch.full((8, 100), size)
    assert float(torch.linalg.vector_norm(weight.double())) <= spectral(weight, reference(torch.zeros(8, 100))) < 1e-15


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_not_finite_or_too_large_to_square_is_not_bounded(value: float) -> None:
    weight = torch.zeros(30, 20)
    weight[17, 3] = value
    assert not spectral(weight, reference(torch.zeros(30, 20))) < math.inf


def test_autocast_and_reduced_precision_do_not_reach_the_products() -> None:
    """Rounded to bfloat16, every entry loses 0.4 %."""
    weight, still = torch.full((1, 64), 1.0 + 2.0**-8 - 2.0**-14), reference(torch.zeros(1, 64))
    norm = float(weight.double().norm())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norm <= spectral(weight, still) <= norm * (1 + 1e-4)
    torch.set_float32_matmul_precision("medium")
    try:
        assert strips._working_dtype(weight, False) == torch.float64
        assert norm <= spectral(weight, still) <= norm * (1 + 1e-9)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_rows_of_a_weight_that_is_not_contiguous_are_its_rows() -> None:
    weight, still = noise(4, 3, 5, 5), reference(torch.zeros(4, 3, 5, 5))
    laid_out = weight.contiguous(memory_format=torch.channels_last)
    assert spectral(laid_out, still) == pytest.approx(spectral(weight, still), rel=1e-6)
    tall = noise(7, 40)
    assert spectral(tall.mT, reference(torch.zeros(40, 7))) >= float(torch.linalg.matrix_norm(tall.double(), 2))


def test_no_reference_of_another_shape_dtype_or_an_extreme_factor() -> None:
    weight = torch.ones(4, 4)
    others = [torch.ones(4, 1), weight.double(), torch.zeros(4, 0)]
    assert not any(reference(values).fits(weight) for values in others)
    assert not any(reference(weight, factor).fits(weight) for factor in (0.0, 1e-20, math.nan, 1e20))
    assert not reference(torch.zeros(4, 0)).fits(torch.zeros(4, 0))


def test_together_weights_get_the_bounds_that_each_gets_alone() -> None:
    pairs = [pair for dtype in DTYPES for pair in cases(dtype)]
    assert changes(pairs)[0] == [changes([pair])[0][0] for pair in pairs]
    assert changes([]) == ([], [])
