"""A small convolutional network: strided convolutions, then a linear head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..layers import GroupNorm
from .mlp import MLP, activation


class ConvNet(nn.Module):
    """Convolutions of the given widths, each halving the image, then global flattening and a linear head.

    Args:
        input_shape: (channels, height, width) of one example.
        outputs: number of logits.
        widths: channels of the convolutions.
        kernel_size: odd, so that padding keeps the grid.
        activation_name: relu, tanh or maxmin.
        norm_groups: group normalisation with a floored divisor after each convolution; 0 for none.
        norm_alpha: its floor.
        bias: whether the layers have one.
        hidden: widths of dense layers between the convolutions and the logits. With widths (32, 64), hidden
            (512,) and 28 x 28 images the network has 1,630,090 parameters, within 0.3 % of the ConvNet of
            the thesis (table 5.3), whose layers are not given.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        outputs: int,
        widths: Sequence[int] = (16, 32),
        kernel_size: int = 3,
        activation_name: str = "maxmin",
        norm_groups: int = 0,
        norm_alpha: float = 0.5,
        bias: bool = True,
        hidden: Sequence[int] = (),
    ) -> None:
        super().__init__()
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={kernel_size} is even. HINT: 3 or 5.")
        layers: list[nn.Module] = []
        channels = input_shape[0]
        for width in widths:
            layers.append(nn.Conv2d(channels, width, kernel_size, stride=2, padding=kernel_size // 2, bias=bias))
            if norm_groups:
                layers.append(GroupNorm(norm_groups, width, norm_alpha))
            layers.append(activation(activation_name))
            channels = width
        self.features = nn.Sequential(*layers)
        with torch.no_grad():
            features = self.features(torch.zeros(1, *input_shape)).numel()
        self.head = MLP((features,), outputs, hidden, activation_name, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
