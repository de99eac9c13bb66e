"""ScaledL2Pool2d keeps the norm, and its gradient is finite and at most one everywhere."""

from __future__ import annotations

import pytest
import torch

from lipdp_lightning.bounds import CertificationError, certify
from lipdp_lightning.layers import ScaledL2Pool2d


def jacobian_norm(layer, x):
    rows = torch.autograd.functional.jacobian(lambda z: layer(z).flatten(), x[None])
    return float(torch.linalg.matrix_norm(rows.reshape(len(rows), -1), 2))


@pytest.mark.parametrize(("kernel", "shape"), [(1, (2, 3, 3)), (2, (2, 4, 6)), (3, (1, 3, 6))])
def test_norm_is_preserved_and_slope_is_one(kernel, shape):
    layer = ScaledL2Pool2d(kernel)
    certificate = certify(layer, shape, 3.0, "huber", compute_dtype=torch.float64)
    assert certificate.nodes[-1].forward == 3.0
    x = torch.randn(5, *shape, dtype=torch.float64)
    out = layer(x)
    assert out.shape == (5, shape[0], shape[1] // kernel, shape[2] // kernel)
    torch.testing.assert_close(out.flatten(1).norm(dim=1), x.flatten(1).norm(dim=1))
    assert max(jacobian_norm(layer, row) for row in x) == pytest.approx(1.0)


def test_each_window_is_its_own():
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    expected = [[(x[0, 0, i : i + 2, j : j + 2]).norm() for j in (0, 2)] for i in (0, 2)]
    torch.testing.assert_close(ScaledL2Pool2d(2)(x)[0, 0], torch.tensor(expected))


def test_the_gradient_at_zero_windows_is_finite():
    x = torch.randn(3, 2, 4, 4)
    x[0] = 0
    x[1, :, :2] = 0
    x.requires_grad_()
    ScaledL2Pool2d(2)(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert torch.equal(x.grad[0], torch.zeros_like(x.grad[0]))


@pytest.mark.parametrize("scale", [1e-45, 3e-38, 4.6e-23, 1e-23, 1e-19, 1e18, 1e30])
def test_the_gradient_bound_holds_where_float32_squares_lose_their_digits(scale):
    torch.manual_seed(0)
    window = (torch.rand(64, 1, 2, 2) + 0.5) * scale
    window = window[torch.isfinite(window).flatten(1).all(1)].requires_grad_()
    ScaledL2Pool2d(2)(window).sum().backward()
    assert float(window.grad.double().flatten(1).norm(dim=1).max()) <= 1 + 1e-6


def test_norms_in_float32_would_break_the_bound_there():
    worst = 0.0
    for size in torch.linspace(4e-23, 6e-23, 50):
        window = torch.full((1, 4), float(size), requires_grad=True)
        torch.linalg.vector_norm(window, dim=1).sum().backward()
        worst = max(worst, float(window.grad.norm()))
    assert worst > 1.05


def test_empty_batches_and_bad_shapes():
    x = torch.zeros(0, 2, 4, 4, requires_grad=True)
    out = ScaledL2Pool2d(2)(x)
    assert out.shape == (0, 2, 2, 2)
    out.sum().backward()
    with pytest.raises(ValueError, match=r"kernel_size=0 is not positive. HINT"):
        ScaledL2Pool2d(0)
    with pytest.raises(CertificationError):
        certify(ScaledL2Pool2d(2), (2, 5, 4), 1.0, "huber")
    with pytest.raises(CertificationError):
        certify(ScaledL2Pool2d(2), (4, 4), 1.0, "huber")
