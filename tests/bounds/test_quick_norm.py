"""Quick spectral norms in float32 against float64 singular values; each margin is needed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lipdp_lightning.bounds import products, quick_norm
from lipdp_lightning.bounds.products import float32_products_are_exact_to_rounding, rows_gram, smaller_gram

CPU = torch.device("cpu")


def truth(matrices: Tensor) -> float:
    return float(torch.linalg.svdvals(matrices.double()).max())


def bound(matrices: Tensor) -> float:
    return quick_norm.quick_norm(matrices.clone())


def rank_one(count: int = 40) -> list[Tensor]:
    """For them every Frobenius norm on the way is the spectral norm: nothing but the margins is left over."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 50), (40, 7), (1, 300), (130, 300)]
    return [
        torch.randn(rows, 1, generator=generator) @ torch.randn(1, columns, generator=generator)
        for rows, columns in shapes
        for _ in range(count // len(shapes))
    ]


def several() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, 1), (5, 5), (64, 256), (300, 40), (2, 1000), (150, 170)]
    noise = [torch.randn(shape, generator=generator) for shape in shapes]
    return [*noise, *(n.double() for n in noise), *(n * 1e-12 for n in noise), *(n * 1e12 for n in noise)]


def violations(of: Callable[[Tensor], float], matrices: list[Tensor]) -> int:
    return sum(of(m[None]) < truth(m) * (1 - 1e-13) for m in matrices)


@pytest.mark.parametrize("strip", [None, 1, 16, 128])
def test_never_below_the_truth(strip: int | None) -> None:
    matrices = [*several(), *rank_one()]
    assert violations(lambda m: quick_norm.quick_norm(m.clone(), strip), matrices) == 0


def test_float32_without_its_margins_fails_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_norm, "_growth", lambda length, dtype: 0.0)
    monkeypatch.setattr(quick_norm, "row_margin", lambda length, dtype: 0.0)
    assert violations(bound, rank_one()) >= 5


def test_gamma_is_what_covers_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that are as far off as summation in some order may be, and in the worst direction."""
    worst = 0.9

    def low(matrices: Tensor) -> Tensor:
        gamma = matrices.shape[-1] * torch.finfo(matrices.dtype).eps / 2.0
        sizes = torch.linalg.matrix_norm(matrices)[:, None, None] ** 2
        exact = matrices @ matrices.mT
        return exact - worst * gamma * sizes * exact / torch.linalg.matrix_norm(exact)[:, None, None]

    monkeypatch.setattr(quick_norm, "rows_gram", low)
    wide = [torch.randn(1, n, generator=torch.Generator().manual_seed(n)) for n in (400, 4000, 40000)]
    assert violations(bound, wide) == 0
    monkeypatch.setattr(quick_norm, "_growth", lambda length, dtype: 0.0)
    monkeypatch.setattr(quick_norm, "row_margin", lambda length, dtype: 1e-6)
    assert violations(bound, wide) == 3


def test_closer_than_the_frobenius_norm_for_noise() -> None:
    noise = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    norm, frobenius = truth(noise), float(torch.linalg.matrix_norm(noise))
    assert bound(noise[None]) <= 1.25 * norm
    assert quick_norm.quick_norm(noise[None].clone(), 64) <= 2.0 * norm < 0.2 * frobenius


def test_largest_of_a_batch() -> None:
    batch = torch.randn(5, 6, 9, generator=torch.Generator().manual_seed(0))
    batch[3] *= 4.0
    batch[1] = 0.0
    assert truth(batch) <= bound(batch) <= 1.2 * truth(batch)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_infinite_for_what_is_not_finite(value: float) -> None:
    matrix = torch.ones(1, 3, 4)
    matrix[0, 1, 2] = value
    assert bound(matrix) == math.inf


@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_infinite_where_float32_products_would_leave_the_range(size: float) -> None:
    assert bound(torch.full((1, 3, 4), size)) == math.inf


# Precision of the products


def just_below_the_midpoint() -> Tensor:
    """Rounded to bfloat16 every entry loses 0.4 %."""
    return torch.full((1, 1, 64), 1.0 + 2.0**-8 - 2.0**-14)


def test_autocast_does_not_reach_the_products() -> None:
    matrix = just_below_the_midpoint()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        protected = bound(matrix)
        assert abs(quick_norm._by_squaring(matrix.clone()) / protected - 1.0) > 1e-3
    assert protected == bound(matrix) >= truth(matrix)


def test_float64_where_float32_products_are_rounded_further(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_bfloat16(matrices: Tensor) -> Tensor:
        factor = matrices.bfloat16().float() if matrices.dtype == torch.float32 else matrices
        return factor @ factor.mT

    monkeypatch.setattr(quick_norm, "rows_gram", as_bfloat16)
    matrix = just_below_the_midpoint()
    assert bound(matrix) < truth(matrix) * (1 - 1e-3)
    torch.set_float32_matmul_precision("medium")
    try:
        assert bound(matrix) >= truth(matrix)
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_reduced_precision_is_noticed(precision: str) -> None:
    assert float32_products_are_exact_to_rounding(CPU)
    torch.set_float32_matmul_precision(precision)
    try:
        assert not float32_products_are_exact_to_rounding(CPU)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert float32_products_are_exact_to_rounding(CPU)


@pytest.mark.parametrize("disagreeing", [False, True])
def test_older_interface_is_enough_to_lose_trust(disagreeing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def precision() -> str:
        if disagreeing:
            raise RuntimeError("mix of the legacy and new APIs")
        return "high"

    monkeypatch.setattr(torch, "get_float32_matmul_precision", precision)
    assert not float32_products_are_exact_to_rounding(CPU)


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this torch has one interface only")
@pytest.mark.parametrize("interface", ["general", "mkldnn", "cuda"])
def test_reduced_precision_is_noticed_through_the_newer_interfaces(interface: str) -> None:
    holders = {
        "general": torch.backends,
        "mkldnn": torch.backends.mkldnn.matmul,
        "cuda": torch.backends.cuda.matmul,
    }
    holder = holders[interface]
    before = holder.fp32_precision
    holder.fp32_precision = "tf32"
    try:
        assert not float32_products_are_exact_to_rounding(CPU)
    finally:
        holder.fp32_precision = before
    assert float32_products_are_exact_to_rounding(CPU)


@pytest.mark.parametrize("name", products._ONEDNN_MODES)
def test_reduced_precision_is_noticed_in_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "BF16")
    assert not float32_products_are_exact_to_rounding(CPU)
    monkeypatch.setenv(name, "strict")
    assert float32_products_are_exact_to_rounding(CPU)


def test_unknown_devices_are_not_trusted() -> None:
    assert not float32_products_are_exact_to_rounding(torch.device("meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(2, 131, 300), (200, 200), (3, 4, 5), (1, 7)])
def test_products_by_strips_are_the_products(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rows_gram(matrices), matrices @ matrices.mH)
    tall = matrices.mT
    torch.testing.assert_close(smaller_gram(tall), tall.mH @ tall)
