"""GroupSort, Householder and the tempered sigmoid by what they compute; their bounds are tested with the rules."""

from __future__ import annotations

import math

import pytest
import torch

from lipdp_lightning.layers import GroupSort, Householder, MaxMin, TemperedSigmoid


def test_maxmin_puts_the_larger_channel_first():
    x = torch.tensor([[1.0, 2.0, 5.0, 3.0, -1.0, -1.0]])
    assert MaxMin()(x).tolist() == [[2.0, 1.0, 5.0, 3.0, -1.0, -1.0]]


@pytest.mark.parametrize("shape", [(6,), (6, 4), (6, 3, 5)])
@pytest.mark.parametrize("group_size", [1, 2, 3, 6])
def test_group_sort_permutes_each_group_of_channels(shape, group_size):
    x = torch.randn(4, *shape)
    out = GroupSort(group_size)(x)
    groups, sorted_groups = x.unflatten(1, (-1, group_size)), out.unflatten(1, (-1, group_size))
    assert torch.equal(groups.sort(2).values, sorted_groups.sort(2).values)
    steps = sorted_groups.diff(dim=2)
    assert bool((steps <= 0).all() if group_size == 2 else (steps >= 0).all())


@pytest.mark.parametrize("angle", [0.0, 0.3, math.pi / 2, math.pi, 5.0])
def test_householder_reflects_one_half_plane_onto_the_other(angle):
    layer = Householder(angle)
    turn = torch.linspace(0, 2 * math.pi, 721, dtype=torch.float64)[:-1]
    x = torch.stack([turn.cos(), turn.sin()], 1)
    out = layer(x)
    torch.testing.assert_close(out.norm(dim=1), torch.ones(720, dtype=torch.float64))
    normal = torch.tensor([math.sin(angle / 2), -math.cos(angle / 2)], dtype=torch.float64)
    assert bool((out @ normal >= -1e-12).all())
    kept = x @ normal > 1e-9
    assert torch.equal(out[kept], x[kept])
    # continuous across the line: neighbours stay neighbours
    assert float((out - out.roll(1, 0)).norm(dim=1).max()) <= float((x - x.roll(1, 0)).norm(dim=1).max()) + 1e-12


def test_tempered_sigmoid_holds_tanh_and_sigmoid():
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    torch.testing.assert_close(TemperedSigmoid()(x), x.tanh())
    torch.testing.assert_close(TemperedSigmoid(1.0, 1.0, 0.0)(x), x.sigmoid())


def test_group_sizes_are_positive():
    with pytest.raises(ValueError, match=r"group_size=0 is not positive. HINT"):
        GroupSort(0)


@pytest.mark.parametrize("layer", [MaxMin(), GroupSort(3), Householder(0.7), TemperedSigmoid(1.58, 3.0, 0.71)])
def test_bfloat16_rounds_once(layer):
    """The certificate's margin covers one rounding per layer, 2^-9 of each entry, forward and backward."""
    torch.manual_seed(0)
    x = torch.randn(200, 6).bfloat16()
    cotangent = torch.randn(200, 6).bfloat16()
    narrow, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    out, exact = layer(narrow), layer(wide)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)
    out.backward(cotangent)
    exact.backward(cotangent.double())
    torch.testing.assert_close(narrow.grad.double(), wide.grad, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("layer", [MaxMin(), GroupSort(3), Householder(), TemperedSigmoid()])
def test_empty_batches(layer):
    x = torch.zeros(0, 6, 2, requires_grad=True)
    out = layer(x)
    assert out.shape == x.shape
    out.sum().backward()
