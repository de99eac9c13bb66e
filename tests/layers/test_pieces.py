"""Sums over the batch are formed in pieces, so that their rounding stays within the margin of a sensitivity.

The sums are adversarial: all examples are equal and their positions, too, so that an example's gradient has the largest
norm that its bound allows for, and all partial sums round in step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tensor_cores import BF16, TF32, piecewise, rounded
from torch import Tensor, nn

from lipdp_lightning.kernels.numeric_environment import (
    check_exact_arithmetic,
    products_on_tensor_cores,
    require_exact_arithmetic,
)
from lipdp_lightning.layers import ScaledConv2d, ScaledLinear, contribution
from lipdp_lightning.layers.contribution import TERMS_OF_A_PIECE
from lipdp_lightning.mechanism.allocation import sum_margin

SEEDS = range(4)


def values() -> list[float]:
    return [1 + float(torch.rand(1, generator=torch.Generator().manual_seed(seed))) for seed in SEEDS]


def shift(layer: nn.Module, row: Tensor, rows: int, factor: float | None = None) -> float:
    """How far one more row moves the stored gradient of the weight, over the norm of the row's own gradient."""
    if factor is not None:
        layer.gradient_scaler = lambda norms: torch.full_like(norms, factor)

    def gradient(number: int, kind: torch.dtype) -> Tensor:
        (weight,) = layer.parameters()
        weight.data = weight.data.to(kind)
        weight.grad = None
        layer(row.to(kind).expand(number, *row.shape)).sum().backward()
        return weight.grad.double()

    own = gradient(1, torch.float64).norm()
    return max(
        float((gradient(n, torch.float32) - gradient(n - 1, torch.float32)).norm() / own)
        for n in (rows, rows - 1, rows - 2)
    )


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "a convolution": (lambda: ScaledConv2d(8, 8, 3, padding=1, bias=False), (8, 32, 32)),
    "a strided convolution": (lambda: ScaledConv2d(4, 8, 2, stride=2, bias=False), (4, 64, 64)),
    "a linear layer on positions": (lambda: ScaledLinear(8, 4, bias=False), (1024, 8)),
}
ROWS = 300


@pytest.mark.parametrize("factor", [None, 0.7], ids=["plain", "scaled"])
@pytest.mark.parametrize("name", LAYERS)
def test_one_row_moves_a_long_sum_within_the_margin(
    name: str, factor: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, shape = LAYERS[name]
    found = max(shift(build(), torch.full(shape, value), ROWS, factor) for value in values())
    assert found <= sum_margin(ROWS)
    monkeypatch.setattr(contribution, "TERMS_OF_A_PIECE", 1 << 40)
    at_once = max(shift(build(), torch.full(shape, value), ROWS, factor) for value in values())
    assert at_once > 1.002 > sum_margin(ROWS), "without pieces, the same check fails"


def products(rows: int, positions: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The equal products of many sums, (rows x positions, sums), of factors as rounded, and before that."""
    drawn = np.random.default_rng(0).random((2, 64))
    # a little above the middle of two neighbours: both factors are rounded up by all that they can be
    factors = 1 + 2.0**-bits * (1 + 2.0**-10) + np.floor(drawn * 4) * 2.0 ** (2 - bits)
    exact = factors.astype(np.float32).astype(np.float64)
    left, right = rounded(exact, bits)
    return np.broadcast_to(left * right, (rows * positions, 64)), exact[0] * exact[1]


def emulated_shift(rows: int, positions: int, bits: int, *, terms: int, from_rounded: bool = False) -> float:
    """The same on tensor cores; ``from_rounded`` compares with factors that were in this precision from the start."""
    all_terms, exact = products(rows, positions, bits)
    own = all_terms[0] if from_rounded else exact
    more, less = piecewise(all_terms, terms), piecewise(all_terms[positions:], terms)
    return float(np.linalg.norm(more - less) / np.linalg.norm(positions * own))


@pytest.mark.parametrize(("rows", "positions"), [(64, 1024), (1024, 64), (4096, 1)])
def test_tensor_cores_stay_within_their_margin(rows: int, positions: int) -> None:
    tf32 = emulated_shift(rows, positions, TF32, terms=TERMS_OF_A_PIECE)
    bf16 = emulated_shift(rows, positions, BF16, terms=TERMS_OF_A_PIECE, from_rounded=True)
    assert max(tf32, bf16) <= sum_margin(rows, tensor_cores=True)
    if positions == 1:
        assert tf32 > 1 + 2.0**-16 + 2.0**-23 * rows, "the margin of a stored sum alone does not cover factors in TF32"
        assert tf32 > 1 + 2.0**-11, "nor does that of one factor"


def test_single_coordinates_stay_within_the_margin_of_tensor_cores_and_without_pieces_they_do_not() -> None:
    rows, positions = 256, 1024
    all_terms, _ = products(rows, positions, BF16)
    own = positions * all_terms[0]

    def lost(terms: int) -> float:
        """How far a coordinate of the stored sum is below the exact one, in shares of it."""
        return float((1 - piecewise(all_terms, terms) / (rows * own)).max())

    def worst(terms: int) -> float:
        more, less = piecewise(all_terms, terms), piecewise(all_terms[positions:], terms)
        return float((np.abs(more - less) / own).max())

    assert worst(TERMS_OF_A_PIECE) <= sum_margin(rows, tensor_cores=True)
    assert lost(TERMS_OF_A_PIECE) < sum_margin(0, tensor_cores=True) - 1 < lost(1 << 40)


def test_factors_of_tensor_cores_have_exact_products() -> None:
    drawn = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0))
    left, right = drawn.bfloat16()
    assert torch.equal((left.float() * right.float()).double(), left.double() * right.double())
    as_tf32 = rounded(drawn.double().numpy(), TF32)
    assert np.array_equal((as_tf32[0] * as_tf32[1]).astype(np.float32), as_tf32[0] * as_tf32[1])
    assert np.array_equal(rounded(left.double().numpy(), TF32), left.double().numpy()), "bfloat16 fits TF32"


def test_rounded_factors_let_a_norm_grow_by_no_more_than_half_a_unit() -> None:
    drawn = np.random.default_rng(1).standard_normal((1000, 50))
    grown = np.linalg.norm(rounded(drawn, TF32), axis=1) / np.linalg.norm(drawn, axis=1)
    worst = rounded(np.array([1 + 2.0**-TF32]), TF32) / (1 + 2.0**-TF32)
    assert grown.max() <= 1 + 2.0**-TF32 and 1 + 2.0**-12 < worst[0] <= 1 + 2.0**-TF32


class Recorded:
    """Notes the switches of the arithmetic while a product is formed."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []
        self._true = contribution._product

    def __call__(self, *given: object) -> Tensor:
        self.seen.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
        return self._true(*given)


def test_switches_are_as_they_were_after_a_product_also_if_it_fails() -> None:
    require_exact_arithmetic()
    with pytest.raises(MemoryError), products_on_tensor_cores(True):
        assert torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.conv.fp32_precision == "tf32"
        assert torch.get_float32_matmul_precision() != "highest", "all spellings agree, or cuBLAS would refuse"
        raise MemoryError
    check_exact_arithmetic()


def test_on_a_cpu_no_switch_is_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contribution, "_product", recorded := Recorded())
    layer = ScaledLinear(3, 2)
    layer.tensor_cores, layer.gradient_scaler = True, torch.ones_like
    layer(torch.ones(5, 3)).sum().backward()
    assert recorded.seen == [(False, False)]


def test_the_margin_of_tensor_cores_is_that_of_its_parts() -> None:
    factors, pieces = (1 + 2.0**-11) ** 2, 1 + 2.0**-9
    assert math.isclose(sum_margin(0, tensor_cores=True), factors * pieces + 2.0**-16, rel_tol=1e-12)
    assert sum_margin(1000, tensor_cores=True) > sum_margin(1000) > 1 + 2.0**-23 * 1000
