"""Defines residual networks with a floored group normalisation in place of batch normalisation, or with none."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ..layers import GroupNorm
from .blocks import activation, image_shape, residual_block


class ResNet(nn.Module):
    """A small residual network: a stem, stages of pre-activation blocks, a global average, and a linear head.

    Without normalisation (the default) every block is non-expansive once the convolutions are projected to norm 1, so
    that bounds do not grow with depth; the logits then need a temperature below 1.

    Args:
        input_shape: (channels, height, width) of one example.
        outputs: number of logits.
        widths: channels of the stages; every stage but the first halves the image.
        blocks: blocks per stage.
        activation_name: relu, tanh or maxmin.
        norm_groups: groups of a group normalisation with a floored divisor before each activation; 0 for none.
        norm_alpha: the floor of the normalisation's divisor.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        outputs: int,
        widths: Sequence[int] = (16, 32, 64),
        blocks: int = 1,
        activation_name: str = "relu",
        norm_groups: int = 0,
        norm_alpha: float = 0.5,
    ) -> None:
        super().__init__()
        if not widths or blocks < 1:
            raise ValueError(f"widths={tuple(widths)}, blocks={blocks} leave no block. HINT: use (16, 32, 64) and 1.")
        channels = widths[0]
        layers: list[nn.Module] = [nn.Conv2d(image_shape(input_shape, "ResNet")[0], channels, 3, padding=1)]
        for stage, after in enumerate(widths):
            for block in range(blocks):
                stride = 2 if stage and block == 0 else 1
                layers.append(residual_block(channels, after, stride, norm_groups, norm_alpha, activation_name))
                channels = after
        if norm_groups:
            layers.append(GroupNorm(norm_groups, channels, norm_alpha))
        layers += [activation(activation_name), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class WideResNet(nn.Module):
    """WideResNet-depth-width: three stages of (depth - 4) / 6 blocks, of 16, 32 and 64 times ``width`` channels.

    40-4 has 8,944,266 parameters, the number that table 5.3 of 004 prints (its text gives the number to 16-4,
    which has 2,747,530).

    Args:
        input_shape: (channels, height, width) of one example.
        outputs: number of logits.
        depth: 16, 28, 40, ...
        width: the factor k.
        norm_groups: groups of the floored normalisation.
        norm_alpha: its floor; each normalisation has Lipschitz constant 1/alpha.
    """

    def __init__(
        self,
        input_shape: Sequence[int] = (3, 32, 32),
        outputs: int = 10,
        depth: int = 16,
        width: int = 4,
        norm_groups: int = 16,
        norm_alpha: float = 1.0,
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth={depth} is not 6 n + 4. HINT: use 16, 22, 28 or 40.")
        blocks = (depth - 4) // 6
        layers: list[nn.Module] = [nn.Conv2d(image_shape(input_shape, "WideResNet")[0], 16, 3, padding=1)]
        channels = 16
        for stage, after in enumerate((16 * width, 32 * width, 64 * width)):
            for i in range(blocks):
                layers.append(residual_block(channels, after, 2 if stage and i == 0 else 1, norm_groups, norm_alpha))
                channels = after
        layers += [GroupNorm(norm_groups, channels, norm_alpha), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
