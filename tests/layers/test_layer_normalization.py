"""Normalisation with a floored divisor: slope 1/alpha, output at most sqrt(n), and no NaN on a black image."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lipdp_lightning.bounds import CertificationError, certify
from lipdp_lightning.layers import GroupNorm, InstanceNorm, LayerNorm

ALPHA = 0.2
LAYERS = [GroupNorm(2, 4, ALPHA), GroupNorm(1, 4, ALPHA), GroupNorm(4, 4, ALPHA), LayerNorm(ALPHA), InstanceNorm(ALPHA)]
SHAPES = [(4,), (4, 3), (4, 2, 3)]


def bounds_of(layer, shape, radius):
    certificate = certify(layer, shape, radius, "huber", compute_dtype=torch.float64)
    lipschitz = certificate.nodes[0].cotangent / certificate.loss_lipschitz
    return lipschitz, certificate.nodes[-1].forward


def jacobian_norm(layer, x):
    rows = torch.autograd.functional.jacobian(lambda z: layer(z).flatten(), x[None])
    return float(torch.linalg.matrix_norm(rows.reshape(len(rows), -1), 2))


def inputs(shape):
    torch.manual_seed(0)
    direction = torch.randn(shape, dtype=torch.float64)
    yield from (torch.zeros(shape, dtype=torch.float64), torch.full(shape, 0.7, dtype=torch.float64))
    spike = torch.zeros(shape, dtype=torch.float64)
    spike.view(-1)[0] = 1.0
    for base in (direction, spike):
        for deviation in (1e-9, ALPHA * (1 - 1e-6), ALPHA, ALPHA * (1 + 1e-6), 1.5 * ALPHA, 100.0):
            yield 3.0 + base / base.std(unbiased=False) * deviation  # every group near the floor


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_slope_and_output(layer, shape):
    lipschitz, _ = bounds_of(layer, shape, 1.0)
    assert lipschitz == pytest.approx(1 / ALPHA)
    slopes = []
    for x in inputs(shape):
        slopes.append(jacobian_norm(layer, x))
        _, norm = bounds_of(layer, shape, float(x.norm()) + 1e-12)
        assert float(layer(x[None]).norm()) <= norm * (1 + 1e-9)
    assert max(slopes) <= lipschitz * (1 + 1e-9)
    singles = isinstance(layer, InstanceNorm | GroupNorm) and not isinstance(layer, LayerNorm)
    if not (singles and len(shape) == 1):  # a group of one number is always zero
        assert max(slopes) >= 0.99 * lipschitz


def test_the_output_bound_is_attained_on_both_sides():
    layer, shape = LayerNorm(ALPHA), (4, 3)
    x = torch.tensor([1.0, -1.0] * 6, dtype=torch.float64).reshape(shape)
    for radius in (0.1, 50.0):
        point = x * (radius / x.norm())
        _, norm = bounds_of(layer, shape, radius)
        assert norm == pytest.approx(min(math.sqrt(12), radius / ALPHA))
        assert 0.999 * norm <= float(layer(point[None]).norm()) <= norm * (1 + 1e-12)


def test_torchs_eps_inside_the_root_is_far_steeper():
    x = torch.full((4, 3), 0.7, dtype=torch.float64)
    torchs = nn.GroupNorm(1, 4, affine=False).double()
    assert jacobian_norm(torchs, x) > 300 > 1 / ALPHA
    with pytest.raises(CertificationError, match=r"use lipdp_lightning\.layers\.GroupNorm"):
        certify(torchs, (4, 3), 1.0, "huber")


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_constant_and_extreme_examples_have_finite_gradients(layer, shape, dtype):
    values = (0.0, 1.0, 1e-30, 1e-42, 1e15, -1e15)
    x = torch.stack([torch.full(shape, v, dtype=dtype) for v in values] + [torch.randn(shape).to(dtype) * 1e15])
    x.requires_grad_()
    out = layer(x)
    assert torch.isfinite(out).all()
    out.backward(torch.randn_like(out))
    assert torch.isfinite(x.grad).all()
    assert float(x.grad.float().flatten(1).norm(dim=1).max()) < 100 / ALPHA


def test_a_root_of_the_mean_square_would_give_nan_on_a_black_image():
    x = torch.zeros(1, 4, requires_grad=True)
    (x / torch.maximum(torch.tensor(ALPHA), x.square().mean().sqrt())).sum().backward()
    assert torch.isnan(x.grad).any()
    x.grad = None
    LayerNorm(ALPHA)(x).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_groups_are_normalised_apart_and_examples_too(layer, shape):
    x = 5 * torch.randn(6, *shape, dtype=torch.float64)
    out = layer(x)
    torch.testing.assert_close(out[2:3], layer(x[2:3]))
    groups = {LayerNorm: 1, InstanceNorm: 4}.get(type(layer), layer.groups)
    parts = out.reshape(6, groups, -1)
    torch.testing.assert_close(parts.mean(2), torch.zeros_like(parts.mean(2)), rtol=0, atol=1e-9)
    assert bool((parts.square().mean(2) <= 1 + 1e-9).all())


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_empty_batches(layer, shape):
    x = torch.zeros(0, *shape, requires_grad=True)
    out = layer(x)
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad.shape == x.shape


def test_bad_arguments_and_shapes():
    for arguments, named in (((3, 4), "4 channels do not split"), ((0, 4), "groups"), ((2, 4, 0.0), "alpha=0.0")):
        with pytest.raises(ValueError, match=named) as caught:
            GroupNorm(*arguments)
        assert "HINT" in str(caught.value)
    with pytest.raises(CertificationError):
        certify(GroupNorm(3), (4, 3), 1.0, "huber")


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_bfloat16_rounds_once(layer):
    torch.manual_seed(0)
    x = (torch.randn(50, 4, 3) + 2.0).bfloat16()
    cotangent = torch.randn(50, 4, 3).bfloat16()
    narrow, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    out, exact = layer(narrow), layer(wide)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-5)
    out.backward(cotangent)
    exact.backward(cotangent.double())
    torch.testing.assert_close(narrow.grad.double(), wide.grad, rtol=2**-8, atol=1e-5)


def test_channels_last_memory_is_read_in_channel_order():
    x = torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    layer = GroupNorm(2, 4, ALPHA)
    torch.testing.assert_close(layer(x), layer(x.contiguous()))
