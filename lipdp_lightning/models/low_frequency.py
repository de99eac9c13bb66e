"""Builds convolutions whose kernels are combinations of public orthonormal patterns: cosines of low frequency.

A kernel K = sum_j c_j B_j with orthonormal B_j is trained through its coefficients c alone, whose gradient is the
projection (<B_j, dL/dK>)_j of the kernel's gradient: its norm is at most that of the full kernel's, for every example.
The bound of a clipped or certified gradient therefore stays as it is, while noise is added to as many numbers as there
are patterns: with 16 of 64 its norm halves.

A convolution with such kernels is a frozen convolution with the patterns, followed by a trained one of size 1 x 1. Both
are ordinary layers, so that every scaling, norm and certificate applies to them as they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def cosine_patterns(frequencies: int, size: int) -> Tensor:
    """Returns (frequencies^2, size, size): products of the orthonormal cosines of lowest frequency (DCT-II)."""
    if not 1 <= frequencies <= size:
        raise ValueError(
            f"frequencies={frequencies}: a kernel of side {size} has the frequencies 0 to {size - 1} along a side. "
            f"HINT: between 1 and {size}, such as {max(1, size // 2)}."
        )
    places = (torch.arange(size, dtype=torch.float64) + 0.5) * math.pi / size
    waves = torch.stack([torch.cos(k * places) for k in range(frequencies)])
    waves = waves / torch.linalg.vector_norm(waves, dim=1, keepdim=True)
    return torch.einsum("ih,jw->ijhw", waves, waves).reshape(-1, size, size)


def low_frequency_convolution(
    start: Tensor, frequencies: int, stride: int = 1, padding: int = 0, bias: bool = False
) -> list[nn.Module]:
    """Returns a frozen convolution with cosines and a trained one of size 1 x 1, which compute one together.

    Args:
        start: the kernels to start from, (outputs, channels, size, size); what is orthogonal to the cosines is lost.
        frequencies: the number of frequencies along each side; there are their square in coefficients per channel.
        stride: the stride of the convolution.
        padding: its padding.
        bias: whether a bias is trained.
    """
    outputs, channels, size, _ = start.shape
    patterns = cosine_patterns(frequencies, size)
    frozen = nn.Conv2d(channels, channels * len(patterns), size, stride, padding, groups=channels, bias=False)
    trained = nn.Conv2d(channels * len(patterns), outputs, 1, bias=bias)
    with torch.no_grad():
        frozen.weight.copy_(patterns.repeat(channels, 1, 1).unsqueeze(1))
        coefficients = torch.einsum("ochw,jhw->ocj", start.double(), patterns)
        trained.weight.copy_(coefficients.reshape(outputs, -1, 1, 1))
    frozen.weight.requires_grad_(False)
    return [frozen, trained]
