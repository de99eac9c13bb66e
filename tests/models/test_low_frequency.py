"""Convolutions in the span of cosines: orthonormal patterns, the same kernels, gradients that do not grow."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lipdp_lightning.models import GaborNet
from lipdp_lightning.models.gabor_net import gabor_filters
from lipdp_lightning.models.low_frequency import cosine_patterns, low_frequency_convolution


@pytest.mark.parametrize(("frequencies", "size"), [(1, 1), (1, 5), (3, 8), (4, 8), (8, 8)])
def test_patterns_are_orthonormal(frequencies: int, size: int) -> None:
    patterns = cosine_patterns(frequencies, size).flatten(1)
    assert len(patterns) == frequencies**2
    torch.testing.assert_close(patterns @ patterns.T, torch.eye(frequencies**2, dtype=torch.float64))


def test_the_lowest_frequencies_are_taken() -> None:
    constant = cosine_patterns(2, 4)[0]
    torch.testing.assert_close(constant, torch.full((4, 4), 0.25, dtype=torch.float64))
    steps = [float(cosine_patterns(frequencies, 8)[-1].diff(dim=1).norm()) for frequencies in (2, 4, 8)]
    assert steps == sorted(steps) and steps[0] < 0.5 < 1.5 < steps[2]


def test_all_frequencies_are_the_convolution_itself() -> None:
    start = gabor_filters(6, 5, 2)
    x = torch.randn(3, 2, 9, 11)
    both = nn.Sequential(*low_frequency_convolution(start, 5, stride=2, padding=1))
    torch.testing.assert_close(both(x), nn.functional.conv2d(x, start, stride=2, padding=1), rtol=1e-4, atol=1e-5)


def kernel_gradients(frequencies: int, patterns_factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the norms of examples' gradients in the coefficients, and in the kernel that they stand for."""
    torch.manual_seed(0)
    frozen, trained = low_frequency_convolution(gabor_filters(6, 5, 2), frequencies, stride=2)
    assert not frozen.weight.requires_grad
    frozen.weight.mul_(patterns_factor)
    patterns = patterns_factor * cosine_patterns(frequencies, 5).float()
    coefficients = trained.weight.detach().reshape(6, 2, -1)
    kernel = torch.einsum("ocj,jhw->ochw", coefficients, patterns).requires_grad_(True)
    norms: tuple[list[float], list[float]] = ([], [])
    for _ in range(8):
        x, target = torch.randn(1, 2, 9, 9), torch.randn(1, 6, 3, 3)
        tied = trained(frozen(x))
        torch.testing.assert_close(tied, nn.functional.conv2d(x, kernel, stride=2), rtol=1e-3, atol=1e-4)
        own = torch.autograd.grad((tied * target).sum(), trained.weight)[0]
        full = torch.autograd.grad((nn.functional.conv2d(x, kernel, stride=2) * target).sum(), kernel)[0]
        norms[0].append(float(own.norm()))
        norms[1].append(float(full.norm()))
    return torch.tensor(norms[0]), torch.tensor(norms[1])


@pytest.mark.parametrize("frequencies", [1, 2, 4])
def test_no_gradient_is_longer_than_that_of_the_kernel(frequencies: int) -> None:
    own, full = kernel_gradients(frequencies)
    assert bool((own <= full * (1 + 1e-5)).all())


def test_patterns_that_are_not_of_norm_one_fail_the_same_check() -> None:
    own, full = kernel_gradients(4, patterns_factor=1.5)
    assert bool((own > full).any())


def test_a_number_of_frequencies_that_the_kernel_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"frequencies=9.*HINT"):
        GaborNet((1, 28, 28), 10, frequencies=9)


def test_the_network_trains_the_coefficients_alone() -> None:
    network = GaborNet((1, 28, 28), 10, frequencies=4)
    trained = {name: p.numel() for name, p in network.named_parameters() if p.requires_grad}
    assert trained == {"features.2.weight": 32 * 16, "head.weight": 10 * 1152}
    assert network(torch.randn(2, 1, 28, 28)).shape == (2, 10)
