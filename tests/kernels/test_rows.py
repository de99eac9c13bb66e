"""Energies of examples and of patches: those of float64, whichever way they are computed, and NaN where a value is."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from lipdp_lightning.kernels.loops import usable
from lipdp_lightning.kernels.rows import larger_first, patch_norms, patch_norms_by_torch, row_norms
from lipdp_lightning.layers import BoundedInput, scale_cotangent


def images(*shape: int, size: float = 1.0) -> Tensor:
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(0))


def exact_patches(x: Tensor, counts: Tensor, groups: int) -> Tensor:
    energy = torch.unflatten(x.double().square(), 1, (groups, -1)).sum(2)
    return (energy * counts.double()).flatten(2).sum(2).amax(1)


def by_torch(x: Tensor) -> Tensor:
    """Laid out so that no loop reads it."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


@pytest.mark.parametrize("layout", [lambda x: x, by_torch])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("shape", [(5, 6, 9), (3, 6, 4, 7), (1, 6, 1, 1)])
def test_energies_are_those_of_float64(layout: Callable[[Tensor], Tensor], groups: int, shape: tuple[int, ...]) -> None:
    x = layout(images(*shape))
    counts = torch.randint(1, 10, shape[2:], generator=torch.Generator().manual_seed(1)).float()
    norms = patch_norms_by_torch(x, counts, groups, 0)
    assert row_norms(x).dtype == norms.dtype == torch.float32
    torch.testing.assert_close(row_norms(x).double(), x.double().flatten(1).norm(dim=1), rtol=1e-6, atol=0)
    torch.testing.assert_close(norms.double().square(), exact_patches(x, counts, groups), rtol=1e-6, atol=0)


def one_by_one(x: Tensor) -> float:
    """In float32, as a loop adds that keeps the dtype of what it reads."""
    return float(np.add.accumulate(np.square(x.flatten().numpy()), dtype=np.float32)[-1])


def test_a_constant_image_is_not_lost_in_a_long_sum() -> None:
    image = torch.full((1, 3, 224, 224), 0.7)
    truth = float(image.double().square().sum())
    assert float(row_norms(image)) == pytest.approx(math.sqrt(truth), rel=2**-24)
    assert float(patch_norms(image, torch.ones(224, 224), 1)) == pytest.approx(math.sqrt(truth), rel=2**-24)
    assert one_by_one(image) != pytest.approx(truth, rel=1e-5)


def test_squares_neither_underflow_nor_overflow_before_they_are_added() -> None:
    for norm in (
        lambda x: row_norms(x, 0),
        lambda x: patch_norms(x.reshape(1, 2, 2), torch.ones(2), 1, 0),
        lambda x: patch_norms(x.reshape(1, 2, 2), torch.ones(2), 2, 0) * math.sqrt(2),
    ):
        for size in (1e30, 1e-30):
            assert float(norm(torch.full((1, 4), size))) == pytest.approx(2 * size, rel=1e-6)


@pytest.mark.filterwarnings("error")
def test_norms_count_more_and_are_infinite_where_float32_ends() -> None:
    x = images(5, 6, 4, 7)
    counts = torch.randint(1, 10, (4, 7), generator=torch.Generator().manual_seed(1)).double()
    for layout in (lambda x: x, by_torch):
        rows, patches = row_norms(layout(x), 3), patch_norms(layout(x), counts, 2, 28)
        assert rows.dtype == patches.dtype == torch.float32
        torch.testing.assert_close(rows.double(), (x.double().flatten(1).square().sum(1) + 3).sqrt(), rtol=1e-6, atol=0)
        torch.testing.assert_close(patches.double(), (exact_patches(x, counts, 2) + 28).sqrt(), rtol=1e-6, atol=0)
    assert row_norms(torch.full((1, 4), 3e38), 1).tolist() == [math.inf]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_example_that_is_not_finite_has_no_finite_energy_and_leaves_the_others_theirs(value: float) -> None:
    x = images(3, 4, 5, 5)

    def found() -> list[Tensor]:
        counts = torch.ones(5, 5)
        return [row_norms(x), patch_norms_by_torch(x, counts, 2, 0), patch_norms(x, counts, 2)]

    before = found()
    x[1, 3, 2, 2] = value
    for old, now in zip(before, found(), strict=True):
        assert not now[1] < math.inf
        assert torch.equal(now[[0, 2]], old[[0, 2]])


def test_no_examples_have_no_energies() -> None:
    none, counts = torch.zeros(0, 3, 4), torch.ones(4)
    assert row_norms(none).shape == (0,)
    assert patch_norms_by_torch(none, counts, 1, 0).shape == patch_norms(none, counts, 1).shape == (0,)


def test_a_gradient_flows_where_one_is_asked_for() -> None:
    x = images(3, 4).requires_grad_()
    assert not usable(x)
    row_norms(x).square().sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, 2 * x)
    with torch.no_grad():
        assert usable(x) and torch.allclose(row_norms(x), x.square().sum(1).sqrt())


def test_a_negated_view_is_no_memory_to_read() -> None:
    """Its memory holds the values with the other sign: ordered or weighed as they lie, they would be others."""
    x = images(5, 6)
    view = torch._neg_view(x)
    assert view.is_neg() and view.is_contiguous() and view.data_ptr() == x.data_ptr()
    assert usable(x) and not usable(view) and not usable(x, view)
    values = -x
    torch.testing.assert_close(larger_first(view), larger_first(values), rtol=0, atol=0)
    bounded = BoundedInput(1.0)
    torch.testing.assert_close(bounded(view), bounded(values))
    rows = torch.zeros(5, 6, requires_grad=True)
    (weighed,) = torch.autograd.grad(scale_cotangent(rows, torch.ones(5)), rows, view)
    torch.testing.assert_close(weighed, values)
