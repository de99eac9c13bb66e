"""BoundedInput: every row within the bound whatever it holds, and no row sees another."""

from __future__ import annotations

import colorsys
import math

import pytest
import torch
from torch import nn

from lipdp_lightning.bounds import CertificationError, certify
from lipdp_lightning.layers import BoundedInput
from lipdp_lightning.layers.input import COLOR_SPACES, NORM_MARGIN, convert_color

SHAPE = (3, 4, 5)


def adversarial_rows(dtype=torch.float32, shape=SHAPE):
    top, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    torch.manual_seed(0)
    rows = [torch.full(shape, v, dtype=dtype) for v in (0.0, 1.0, -1.0, 1e38, -top, top, tiny, tiny / 64, 1 / 3)]
    rows += [torch.full(shape, v, dtype=dtype) for v in (math.inf, -math.inf, math.nan)]
    mixed = torch.randn(shape, dtype=dtype)
    for value in (math.nan, math.inf, -math.inf, top, tiny / 64):
        row = mixed.clone()
        row.view(-1)[::7] = value
        rows.append(row)
    alternating = torch.full(shape, top, dtype=dtype)
    alternating.view(-1)[::2] *= -1
    rows += [alternating, mixed, mixed * 1e-6, mixed * 1e6, torch.rand(shape, dtype=dtype)]
    small_value = torch.zeros(shape, dtype=dtype)
    small_value[0], small_value[1] = tiny / 64, -1.0  # a saturation of 1 / (tiny / 64)
    rows.append(small_value)
    return torch.stack(rows)


@pytest.mark.parametrize("bound", [1e-3, 1.0, 10.0, 1e4])
@pytest.mark.parametrize("mode", ["clip", "normalize"])
@pytest.mark.parametrize("color_space", COLOR_SPACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_row_is_finite_and_within_the_bound(bound, mode, color_space, dtype):
    out = BoundedInput(bound, mode, color_space)(adversarial_rows(dtype))
    assert out.dtype == dtype
    assert torch.isfinite(out).all()
    assert float(out.double().flatten(1).norm(dim=1).max()) <= bound * (1 + 2**-20)


def test_the_plain_formula_breaks_on_these_rows():
    """x * bound / max(norm, bound) in float32: infinities, and rounding that grows with the dimension."""
    x = adversarial_rows()
    plain = x * (1.0 / x.flatten(1).norm(dim=1).clamp_min(1.0)).reshape(-1, 1, 1, 1)
    assert not torch.isfinite(plain).all()
    wide = torch.full((1, 1_000_000), 3.4e38)
    factor = (1.0 / wide.double().norm()).float()  # a subnormal number
    assert float((wide * factor).double().norm()) > 1 + 2**-20
    assert float(BoundedInput(1.0)(wide).double().norm()) <= 1.0
    long = torch.full((1, 200_000), 0.1).bfloat16()
    assert float((long * (1 / long.double().norm()).bfloat16()).double().norm()) > 1 + 2**-20
    assert float(BoundedInput(1.0)(long).double().norm()) <= 1.0


@pytest.mark.parametrize("mode", ["clip", "normalize"])
@pytest.mark.parametrize("color_space", COLOR_SPACES)
def test_no_row_changes_another(mode, color_space):
    layer = BoundedInput(1.0, mode, color_space)
    x = adversarial_rows()
    out = layer(x)
    for i in range(len(x)):
        for content in (0.0, math.nan, 1e38):
            changed = x.clone()
            changed[i] = content
            others = torch.arange(len(x)) != i
            assert torch.equal(layer(changed)[others], out[others])


def test_clip_leaves_the_ball_alone_and_projects_the_rest():
    layer = BoundedInput(2.0)
    inside = torch.randn(10, 7)
    inside = inside / inside.norm(dim=1, keepdim=True) * torch.linspace(0, 1.99, 10)[:, None]
    assert torch.equal(layer(inside), inside)
    outside = torch.randn(10, 7) * 50
    expected = 2 * outside / outside.norm(dim=1, keepdim=True)
    torch.testing.assert_close(layer(outside), expected, rtol=1e-6, atol=1e-6)


def test_normalize_reaches_the_sphere_and_keeps_zero():
    layer = BoundedInput(10.0, "normalize")
    x = torch.stack([torch.zeros(5), torch.full((5,), 1e-8), torch.full((5,), 1e8), torch.randn(5)])
    out = layer(x)
    assert torch.equal(out[0], torch.zeros(5))
    torch.testing.assert_close(out[1:].norm(dim=1), torch.full((3,), 10.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", ["clip", "normalize"])
@pytest.mark.parametrize("color_space", COLOR_SPACES)
def test_empty_batches(mode, color_space):
    out = BoundedInput(1.0, mode, color_space)(torch.zeros(0, *SHAPE))
    assert out.shape == ((0, 1, 4, 5) if color_space == "grayscale" else (0, *SHAPE))


def test_images_of_bytes_become_floats():
    out = BoundedInput(1.0)(torch.full((2, 3, 4, 4), 200, dtype=torch.uint8))
    assert out.is_floating_point()
    assert float(out.flatten(1).norm(dim=1).max()) == pytest.approx(1.0)


def test_gradients_stay_finite():
    x = adversarial_rows()[[0, 1, 8, 18]].requires_grad_()
    BoundedInput(1.0, "normalize")(x).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_hsv_is_that_of_colorsys():
    generator = torch.Generator().manual_seed(0)
    colors = torch.rand(400, 3, generator=generator, dtype=torch.float64)
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)] * 3)
    pixels = torch.cat([colors, corners])
    out = convert_color(pixels.t().reshape(1, 3, -1, 1), "hsv")[0, :, :, 0].t()
    expected = torch.tensor([colorsys.rgb_to_hsv(*p) for p in pixels.tolist()], dtype=torch.float64)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_linear_color_spaces():
    pixels = torch.rand(1, 3, 6, 7, dtype=torch.float64)
    yiq = convert_color(pixels, "yiq")[0].flatten(1).t()
    # colorsys rounds the matrix to two digits
    expected = torch.tensor([colorsys.rgb_to_yiq(*p) for p in pixels[0].flatten(1).t().tolist()], dtype=torch.float64)
    torch.testing.assert_close(yiq, expected, rtol=0, atol=0.01)
    luma = convert_color(pixels, "grayscale")
    red, green, blue = pixels.unbind(1)
    torch.testing.assert_close(luma[:, 0], 0.299 * red + 0.587 * green + 0.114 * blue)
    y, u, v = convert_color(pixels, "yuv").unbind(1)
    torch.testing.assert_close(y, luma[:, 0])
    torch.testing.assert_close(u, 0.492 * (blue - y), rtol=0, atol=1e-3)
    torch.testing.assert_close(v, 0.877 * (red - y), rtol=0, atol=1e-3)
    for space in ("yiq", "yuv"):
        gray = convert_color(torch.full((1, 3, 1, 1), 0.7, dtype=torch.float64), space).flatten()
        torch.testing.assert_close(gray, torch.tensor([0.7, 0.0, 0.0], dtype=torch.float64), rtol=0, atol=1e-4)


def test_color_spaces_want_rgb_images():
    with pytest.raises(ValueError, match=r"HINT: give it RGB images"):
        BoundedInput(1.0, color_space="hsv")(torch.zeros(2, 1, 4, 4))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0.0,), "bound=0.0"),
        ((math.inf,), "bound=inf"),
        ((1.0, "scale"), "mode='scale'"),
        ((1.0, "clip", "lab"), "'lab'"),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    with pytest.raises(ValueError, match=named) as caught:
        BoundedInput(*arguments)
    assert "HINT" in str(caught.value)


def test_the_certificate_takes_its_bound():
    certificate = certify(nn.Sequential(BoundedInput(2.0), nn.Linear(4, 3)), (4,), 100.0, "cross_entropy")
    assert certificate.nodes[1].forward == pytest.approx(2.0 * NORM_MARGIN, rel=1e-6)
    inner = certify(nn.Sequential(BoundedInput(200.0), nn.Linear(4, 3)), (4,), 100.0, "cross_entropy")
    assert inner.nodes[1].forward == pytest.approx(100.0, rel=1e-6)


def test_normalising_after_trained_layers_has_no_bound():
    """Its slope at zero is unbounded; clipping is a projection and may come anywhere."""
    with pytest.raises(CertificationError, match="overflows"):
        certify(nn.Sequential(nn.Linear(4, 3), BoundedInput(1.0, "normalize")), (4,), 1.0, "cross_entropy")
    certify(nn.Sequential(nn.Linear(4, 3), BoundedInput(1.0)), (4,), 1.0, "cross_entropy")


@pytest.mark.parametrize("mode", ["clip", "normalize"])
@pytest.mark.parametrize("color_space", COLOR_SPACES)
@pytest.mark.parametrize("bound", [1e-3, 3.0])
def test_rows_are_the_same_whether_a_loop_bounds_them_or_torch(mode, color_space, bound):
    layer, x = BoundedInput(bound, mode, color_space), adversarial_rows()
    by_torch = layer(x.transpose(0, 1).contiguous().transpose(0, 1))
    torch.testing.assert_close(layer(x), by_torch, rtol=2**-22, atol=0)
    before = x.clone()
    layer(x)
    assert torch.equal(x.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0))
