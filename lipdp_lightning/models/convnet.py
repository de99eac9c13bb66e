"""Defines convolutional networks: one with strided convolutions, those of the papers, and a shallow VGG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from .blocks import convolution_stage, feature_shape, image_shape, pooling
from .mlp import MLP


class ConvNet(nn.Module):
    """A network of strided convolutions that each halve the image, followed by flattening and a linear head.

    Args:
        input_shape: (channels, height, width) of one example.
        outputs: number of logits.
        widths: channels of the convolutions.
        kernel_size: side of the kernels, odd so that padding keeps the grid.
        activation_name: relu, tanh or maxmin.
        norm_groups: groups of a group normalisation with a floored divisor after each convolution; 0 for none.
        norm_alpha: the floor of the normalisation's divisor.
        bias: whether the layers have a bias.
        hidden: widths of dense layers between the convolutions and the logits.
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
            raise ValueError(f"kernel_size={kernel_size} is even. HINT: use 3 or 5.")
        channels, *_ = image_shape(input_shape, "ConvNet")
        layers: list[nn.Module] = []
        for width in widths:
            layers += convolution_stage(
                channels, width, kernel_size, activation_name, norm_groups, norm_alpha, bias, stride=2
            )
            channels = width
        self.features = nn.Sequential(*layers)
        self.head = MLP(feature_shape(self.features, input_shape, "ConvNet"), outputs, hidden, activation_name, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@dataclass(frozen=True)
class _Published:
    """(channels, kernel size, padding, pooling window or 1) of every convolution, and hidden dense widths."""

    convolutions: tuple[tuple[int, int, int, int], ...]
    hidden: tuple[int, ...]


class PublishedConvNet(nn.Module):
    """The ConvNets of papers 000 and 004, as near as their text allows.

    The papers print counts of parameters and, for 000, of layers; they give no widths, kernels or pooling. What
    is here has exactly the printed counts on 28 x 28 grey images and 10 classes. It is the plainest network that
    has them, and other networks have them too.

    ========================  ==========  ==========================================================  =========
    name                      source      layers                                                      parameters
    ========================  ==========  ==========================================================  =========
    ``mnist_83k``             000 tab. 4  conv 20 of 5 x 5, pool 3, dense 64, 10                      83,154
    ``fashion_133k``          000 tab. 4  conv 16, 32, 64, 128 of 3 x 3, each with pool 2,            132,746
                                          dense 256, 10
    ``thesis_1626k``          004 5.3     conv 32, conv 64 of 3 x 3, pool 2, dense 128, 10            1,625,866
    ========================  ==========  ==========================================================  =========

    Group normalisation after every convolution follows section 5 of 000; ours has no affine map, so it adds no
    parameters.

    Args:
        name: one of the above.
        input_shape: (channels, height, width); the count holds for (1, 28, 28).
        outputs: number of logits.
        activation_name: relu, tanh or maxmin; assumed.
        pooling_name: max or average; assumed.
        norm_groups: 0 for none.
        norm_alpha: the floor of the normalisation's divisor.
    """

    def __init__(
        self,
        name: str,
        input_shape: Sequence[int] = (1, 28, 28),
        outputs: int = 10,
        activation_name: str = "relu",
        pooling_name: str = "max",
        norm_groups: int = 0,
        norm_alpha: float = 0.5,
    ) -> None:
        super().__init__()
        if name not in PUBLISHED:
            raise ValueError(f"name={name!r} is not a network of the papers. HINT: use one of {', '.join(PUBLISHED)}.")
        channels, *_ = image_shape(input_shape, "PublishedConvNet")
        layers: list[nn.Module] = []
        for width, kernel, padding, pool in PUBLISHED[name].convolutions:
            layers += convolution_stage(
                channels, width, kernel, activation_name, norm_groups, norm_alpha, padding=padding
            )
            if pool > 1:
                layers.append(pooling(pooling_name, pool))
            channels = width
        self.features = nn.Sequential(*layers)
        size = feature_shape(self.features, input_shape, "PublishedConvNet")
        self.head = MLP(size, outputs, PUBLISHED[name].hidden, activation_name)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


PUBLISHED = {
    "mnist_83k": _Published(((20, 5, 0, 3),), (64,)),
    "fashion_133k": _Published(((16, 3, 1, 2), (32, 3, 1, 2), (64, 3, 1, 2), (128, 3, 1, 2)), (256,)),
    "thesis_1626k": _Published(((32, 3, 1, 1), (64, 3, 1, 2)), (128,)),
}


class ShallowVGG(nn.Module):
    """Stages of one 3 x 3 convolution and one pooling, the last pooling global, then a linear layer.

    With the defaults on 32 x 32 colour images it has 131,466 parameters, the count that table 4 of 000 prints for its
    ShallowVGG, whose layers are not given.

    Args:
        input_shape: (channels, height, width) of one example.
        outputs: number of logits.
        widths: channels of the stages.
        activation_name: relu, tanh or maxmin.
        pooling_name: max, average or l2, between stages; the global pooling is an average.
        norm_groups: groups of a group normalisation with a floored divisor after each convolution; 0 for none.
        norm_alpha: the floor of the normalisation's divisor.
    """

    def __init__(
        self,
        input_shape: Sequence[int] = (3, 32, 32),
        outputs: int = 10,
        widths: Sequence[int] = (32, 64, 64, 128),
        activation_name: str = "relu",
        pooling_name: str = "max",
        norm_groups: int = 0,
        norm_alpha: float = 0.5,
    ) -> None:
        super().__init__()
        if not widths:
            raise ValueError("ShallowVGG: widths is empty. HINT: use (32, 64, 64, 128).")
        channels, *_ = image_shape(input_shape, "ShallowVGG")
        layers: list[nn.Module] = []
        for stage, width in enumerate(widths):
            if stage:
                layers.append(pooling(pooling_name, 2))
            layers += convolution_stage(channels, width, 3, activation_name, norm_groups, norm_alpha)
            channels = width
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        feature_shape(self.features, input_shape, "ShallowVGG")
        self.head = nn.Linear(channels, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
