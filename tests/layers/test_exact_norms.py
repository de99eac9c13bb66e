"""Exact norms of each example's gradient in a layer: lipdp_lightning/layers/contribution.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_scaled import CASES, Largest, build, per_example
from torch import Tensor, nn

from lipdp_lightning.layers import ScaledConv1d, ScaledConv2d, ScaledLinear
from lipdp_lightning.layers import contribution as room
from lipdp_lightning.layers.contribution import LARGEST_CANCELLATION, Contribution

pytestmark = pytest.mark.filterwarnings("ignore:Using padding=")

# with few positions per channel Gram matrices are the cheaper way, in CASES it is nearly always the product
FEW_POSITIONS = [
    (ScaledLinear, (40, 30), {}, (3, 40)),
    (ScaledConv2d, (12, 20, 3), {"padding": 1, "stride": 2}, (12, 4, 4)),
    (ScaledConv2d, (12, 24, 3), {"groups": 2, "dilation": 2, "bias": False}, (12, 6, 6)),
    (ScaledConv1d, (8, 20, 4), {"stride": 3, "padding": 2}, (8, 7)),
]


def contribution_of(case: Any, dtype: torch.dtype) -> tuple[Contribution, Any, Tensor, Tensor]:
    layer, plain, x = build(case, dtype)
    kept: list[Contribution] = []
    layer.gradient_keeper = kept.append
    out = layer(x)
    cotangent = torch.randn_like(out)
    out.backward(cotangent)
    assert all(p.grad is None for p in layer.parameters())
    (contribution,) = kept
    return contribution, plain, x.detach(), cotangent


def true_norms(plain: nn.Module, x: Tensor, cotangent: Tensor) -> Tensor:
    """By autograd, one example at a time, in float64."""
    rows = per_example(plain.double(), x.double(), cotangent.double())
    return torch.tensor([math.hypot(*(float(g.norm()) for g in row.values() if g is not None)) for row in rows])


@pytest.mark.parametrize("case", CASES + FEW_POSITIONS, ids=str)
@pytest.mark.parametrize("frozen", ["weight", "bias", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_norms_are_those_of_autograd_and_never_below(case: Any, frozen: str | None, dtype: torch.dtype) -> None:
    if case[2].get("bias") is False and frozen:
        return
    contribution, plain, x, cotangent = contribution_of(case, dtype)
    if frozen:
        contribution.trains = (frozen != "weight", frozen != "bias")
        getattr(plain, frozen).requires_grad_(False)
    norms, exact = contribution.norms().double(), true_norms(plain, x, cotangent)
    assert norms.dtype == torch.float64 and (norms >= exact).all()
    assert (norms <= exact * (1 + 1e-3)).all()  # what rounding is paid with


IMAGES = [case for case in CASES + FEW_POSITIONS if case[0] is ScaledConv2d and case[2].get("stride", 1) == 1]


@pytest.mark.parametrize("case", [*IMAGES, (ScaledConv2d, (3, 4, (2, 3)), {"padding": (1, 2)}, (3, 11, 13))], ids=str)
def test_bands_have_the_norms_of_whole_patches(case: Any, monkeypatch: Any) -> None:
    contribution, plain, x, cotangent = contribution_of(case, torch.float64)
    banded, exact = [contribution.norms(views) for views in (1, 2, 3)], true_norms(plain, x, cotangent)
    assert (banded[0] >= exact).all() and not (WithoutABand(**vars(contribution)).norms() >= exact).all()
    monkeypatch.setattr(room, "_bands", room._patches)
    torch.testing.assert_close(banded, [contribution.norms(views) for views in (1, 2, 3)], rtol=1e-9, atol=0)


def test_bands_copy_an_image_once_for_each_column_of_the_kernel() -> None:
    contribution, *_ = contribution_of((ScaledConv2d, (4, 5, 3), {"padding": 1}, (4, 16, 16)), torch.float32)
    (parts, _), *_ = contribution._parts(1)
    assert len(parts) == 3 and len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert parts[0].untyped_storage().nbytes() == 4 * 6 * 4 * 3 * 18 * 16


@pytest.mark.parametrize("case", CASES + FEW_POSITIONS, ids=str)
def test_the_weighted_sum_is_that_of_autograd(case: Any) -> None:
    contribution, plain, x, cotangent = contribution_of(case, torch.float64)
    factor = torch.tensor([0.5, 0.0, 3.0, 1.0, 1e-3, 7.0], dtype=torch.float64)
    alone = per_example(plain, x, cotangent)
    for name, gradient in zip(("weight", "bias"), contribution.gradients(factor), strict=True):
        if getattr(plain, name) is None:
            assert gradient is None
            continue
        expected = sum(c * row[name] for c, row in zip(factor, alone, strict=True))
        torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-11)


class HalfThePositions(Contribution):
    def _unfolded(self, x: Tensor, d: Tensor) -> tuple[list[Tensor], Tensor]:
        patches, cotangents = super()._unfolded(x, d)
        half = -(-cotangents.shape[3] // 2)
        return [part[..., :half] for part in patches], cotangents[..., :half]


class WithoutABand(Contribution):
    def _unfolded(self, x: Tensor, d: Tensor) -> tuple[list[Tensor], Tensor]:
        patches, cotangents = super()._unfolded(x, d)
        return patches[1:], cotangents


class WithoutBias(Contribution):
    def _norms(self, x: Tensor, d: Tensor, views: int) -> Tensor:
        self.trains = (True, False)
        return super()._norms(x, d, views)


@pytest.mark.parametrize("kind", [Contribution, HalfThePositions, WithoutBias])
@pytest.mark.parametrize("case", [CASES[3], CASES[10], FEW_POSITIONS[1]], ids=str)
def test_half_the_positions_or_no_bias_fail_the_same_check(case: Any, kind: type[Contribution]) -> None:
    contribution, plain, x, cotangent = contribution_of(case, torch.float64)
    twin = kind(**vars(contribution))
    assert bool((twin.norms() >= true_norms(plain, x, cotangent)).all()) is (kind is Contribution)


def cancelling(case: Any, noise: float) -> tuple[Contribution, Tensor]:
    """Equal patches, cotangents that nearly add to zero: the true norm is far below that of the parts."""
    contribution, plain, _, _ = contribution_of(case, torch.float32)
    torch.manual_seed(1)
    x = torch.ones(64, *case[3]) + noise * torch.randn(64, *case[3])
    cotangent = torch.randn(64, *contribution.cotangent.shape[1:])
    axes = tuple(range(2, cotangent.dim())) if contribution.options else tuple(range(1, cotangent.dim() - 1))
    cotangent = cotangent - cotangent.mean(axes, keepdim=True)
    contribution.inputs, contribution.cotangent = x, cotangent
    return contribution, true_norms(plain, x, cotangent)


@pytest.mark.parametrize("case", [(ScaledConv2d, (1, 2, 3), {}, (1, 9, 9)), (ScaledLinear, (30, 30), {}, (12, 30))])
@pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-4])
def test_cancelling_positions_leave_rounding_that_the_norm_pays_for(case: Any, noise: float, monkeypatch: Any) -> None:
    """Product and Gram. What float32 makes of the gradient, divided by the norm, is bounded as well."""
    contribution, exact = cancelling(case, noise)
    norms = contribution.norms().double()
    assert (norms >= exact).all()
    for i in range(0, 64, 7):
        factor = torch.zeros(64)
        factor[i] = 1 / norms[i]
        released = [g.double().norm() for g in contribution.gradients(factor) if g is not None]
        assert math.hypot(*map(float, released)) <= 1 + 2**-16
    # parts that cancel are bounded in units of what is released
    parts = contribution.cotangent.flatten(1).norm(dim=1) * contribution.inputs.flatten(1).norm(dim=1)
    assert (parts / norms < 3.1 * LARGEST_CANCELLATION).all()  # patches overlap: up to 9 reads of a pixel
    monkeypatch.setattr(room, "_above", lambda square, envelope, terms: square.sqrt())
    monkeypatch.setattr(room, "_ROUNDING", 0.0)
    assert not (contribution.norms().double() >= exact).all()  # the same check, without margins


@pytest.mark.parametrize("case", [CASES[3], CASES[9], FEW_POSITIONS[1], FEW_POSITIONS[3]], ids=str)
def test_rows_are_measured_a_few_at_a_time(case: Any, monkeypatch: Any) -> None:
    contribution, *_ = contribution_of(case, torch.float32)
    whole = contribution.norms()
    rows = 6 * contribution.weight.numel()
    monkeypatch.setattr(room, "LARGEST_INTERMEDIATE", 1)
    with Largest() as largest:
        torch.testing.assert_close(contribution.norms(), whole, rtol=1e-6, atol=0)
    assert largest.numel <= max(contribution.inputs.numel(), contribution.cotangent.numel(), rows / 6, 600)


def test_a_gradient_of_every_example_is_never_held(monkeypatch: Any) -> None:
    monkeypatch.setattr(room, "LARGEST_INTERMEDIATE", 2**18)
    layer = ScaledConv2d(8, 64, 3, padding=1)
    kept: list[Contribution] = []
    layer.gradient_keeper = kept.append
    x = torch.randn(512, 8, 6, 6)
    layer(x).square().sum().backward()
    with Largest() as largest:
        kept[0].gradients(1 / kept[0].norms())
    assert largest.numel <= layer(x).numel() < 512 * layer.weight.numel()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["inputs", "cotangent"])
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[9], FEW_POSITIONS[1]], ids=str)
def test_a_row_that_is_not_finite_has_no_finite_norm_and_is_left_out(case: Any, where: str, bad: float) -> None:
    contribution, *_ = contribution_of(case, torch.float32)
    clean = contribution.gradients(torch.tensor([1.0, 1, 0, 1, 1, 1]))
    getattr(contribution, where).detach()[2].flatten()[0] = bad
    norms = contribution.norms()
    assert torch.isfinite(norms).tolist() == [True, True, False, True, True, True]
    for found, expected in zip(contribution.gradients(torch.isfinite(norms).float()), clean, strict=True):
        assert found is None or torch.equal(found, expected)


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[9]], ids=str)
def test_autocast_changes_neither_norms_nor_sums(case: Any) -> None:
    layer, _, x = build(case, torch.float32)
    kept: list[Contribution] = []
    layer.gradient_keeper = kept.append
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
        cotangent = torch.randn_like(out)
        out.backward(cotangent)
        norms, sums = kept[0].norms(), kept[0].gradients(torch.ones(6))
    assert out.dtype == torch.bfloat16 and norms.dtype == torch.float32
    assert torch.equal(norms, kept[0].norms())
    assert all(s is None or torch.equal(s, t) for s, t in zip(sums, kept[0].gradients(torch.ones(6)), strict=True))


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[5], CASES[13]], ids=str)
def test_empty_batches_contribute_nothing(case: Any) -> None:
    layer, _, x = build(case)
    kept: list[Contribution] = []
    layer.gradient_keeper = kept.append
    layer(x[:0].detach()).sum().backward()
    assert kept[0].norms().shape == (0,)
    for gradient in kept[0].gradients(kept[0].norms()):
        assert gradient is None or not gradient.any()
