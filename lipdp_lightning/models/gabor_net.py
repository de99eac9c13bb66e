"""Defines a convolutional network that starts from Gabor filters and is trained from the first layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..layers import Centre, GroupNorm
from .blocks import activation, feature_shape, image_shape
from .low_frequency import low_frequency_convolution


def gabor_filters(count: int, size: int, channels: int = 1) -> Tensor:
    """Returns (count, channels, size, size): edges and bars in eight orientations, at one and two waves across the
    window.

    The filters are public, since they depend on their shape alone. Every filter has mean 0 and norm 1, and weighs all
    channels alike.
    """
    line = torch.linspace(-1, 1, size, dtype=torch.float64)
    down, across = torch.meshgrid(line, line, indexing="ij")
    filters = []
    for index in range(count):
        angle, phase = math.pi * (index // 2 % 8) / 8, math.pi / 2 * (index % 2)
        frequency = 1 + index // 16 % 2
        along = across * math.cos(angle) + down * math.sin(angle)
        wave = torch.exp(-2 * (across**2 + down**2)) * torch.cos(math.pi * frequency * along + phase)
        wave = wave - wave.mean()
        filters.append(wave / wave.norm())
    stacked = torch.stack(filters).unsqueeze(1).expand(-1, channels, -1, -1)
    return (stacked / math.sqrt(channels)).to(torch.get_default_dtype())


class GaborNet(nn.Module):
    """Centring of the image, a convolution that starts from Gabor filters, group normalisation, and a linear head.

    Args:
        input_shape: (channels, height, width) of one example.
        outputs: number of logits.
        width: number of filters of the first convolution.
        kernel_size: side of these filters.
        stride: stride of the first convolution.
        padding: padding of the first convolution.
        activation_name: relu, tanh or maxmin.
        pool: window of the average pooling behind every convolution but the last; 1 for none.
        deeper: widths of further 3 x 3 convolutions, each with activation, normalisation and pooling.
        norm_groups: groups of the normalisation behind each activation; 0 for none.
        norm_alpha: the floor of the normalisation's divisor.
        bias: whether the layers have a bias.
        zero_init: whether the head starts at zero.
        frequencies: if it is not 0, the first filters are trained in the span of so many cosines along each side, with
            noise on frequencies**2 numbers for each instead of kernel_size**2.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        outputs: int,
        width: int = 32,
        kernel_size: int = 8,
        stride: int = 4,
        padding: int = 0,
        activation_name: str = "maxmin",
        pool: int = 1,
        deeper: Sequence[int] = (),
        norm_groups: int = 16,
        norm_alpha: float = 0.1,
        bias: bool = False,
        zero_init: bool = False,
        frequencies: int = 0,
    ) -> None:
        super().__init__()
        channels, _, _ = image_shape(input_shape, "GaborNet")
        filters = gabor_filters(width, kernel_size, channels)
        layers: list[nn.Module] = [Centre()]
        if frequencies:
            layers += low_frequency_convolution(filters, frequencies, stride, padding, bias)
        else:
            first = nn.Conv2d(channels, width, kernel_size, stride, padding, bias=bias)
            with torch.no_grad():
                first.weight.copy_(filters)
            layers.append(first)
        for before, after in zip((width, *deeper), (*deeper, None), strict=True):
            layers.append(activation(activation_name))
            if pool > 1:
                layers.append(nn.AvgPool2d(pool))
            if norm_groups:
                layers.append(GroupNorm(norm_groups, before, norm_alpha))
            if after is not None:
                layers.append(nn.Conv2d(before, after, 3, padding=1, bias=bias))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(math.prod(feature_shape(self.features, input_shape, "GaborNet")), outputs, bias=bias)
        if zero_init:
            nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))
