"""Defines gradient-norm-preserving networks (section 3.1 of paper 001), in which cotangents keep their norm.

Layers start orthogonal and stay so under ``projection: bjorck`` with ``max_norm: 1``. A convolution is orthogonal
exactly if its windows do not overlap (kernel = stride, kappa = 1), so these are the only ones here. A layer may not
have more outputs than inputs per window, because its transpose, which carries the cotangent, could not preserve norms.
Activations sort (GroupSort), and pooling takes the l2 norm of a window; neither shortens a cotangent.

The logits of such a network move by at most the input bound, so the loss needs a temperature well below 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import Tensor, nn

from ..layers import GroupSort, ScaledL2Pool2d
from .blocks import feature_shape, image_shape


def _orthogonal(layer: nn.Linear | nn.Conv2d, inputs: int, outputs: int, place: str) -> nn.Module:
    if outputs > inputs:
        raise ValueError(
            f"{place} has {outputs} outputs for {inputs} inputs, so its transpose cannot preserve norms. "
            f"HINT: use a width of at most {inputs}."
        )
    nn.init.orthogonal_(layer.weight.view(outputs, inputs))
    return layer


def _dense(widths: Sequence[int], group_size: int) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Flatten()]
    for i, (before, after) in enumerate(itertools.pairwise(widths)):
        if i:
            layers.append(GroupSort(group_size))
        layers.append(_orthogonal(nn.Linear(before, after, bias=False), before, after, f"dense layer {i}"))
    return layers


class NormPreservingMLP(nn.Module):
    """Orthogonal dense layers without bias, with GroupSort between them, to be trained with ``projection: bjorck``.

    Args:
        input_shape: the shape of one example.
        outputs: number of logits.
        hidden: widths that do not increase, multiples of group_size.
        group_size: the group size of GroupSort; 2 is MaxMin.
    """

    def __init__(
        self, input_shape: Sequence[int], outputs: int, hidden: Sequence[int] = (64, 64), group_size: int = 2
    ) -> None:
        super().__init__()
        _divisible(hidden, group_size)
        self.layers = nn.Sequential(*_dense([math.prod(input_shape), *hidden, outputs], group_size))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class NormPreservingConvNet(nn.Module):
    """Convolutions with kernel = stride, GroupSort, l2 pooling and dense layers, to be trained with ``projection:
    bjorck``.

    Args:
        input_shape: (channels, height, width); torch crops what the strides and the pool do not cover.
        outputs: number of logits.
        widths: channels of the convolutions, at most kernel^2 times the channels before; multiples of group_size.
        kernel_sizes: kernel and stride of each convolution.
        pool: window of the l2 pooling behind the convolutions; 1 for none.
        hidden: widths of dense layers before the logits.
        group_size: the group size of GroupSort; 2 is MaxMin.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        outputs: int,
        widths: Sequence[int] = (16, 64),
        kernel_sizes: Sequence[int] = (4, 2),
        pool: int = 1,
        hidden: Sequence[int] = (),
        group_size: int = 2,
    ) -> None:
        super().__init__()
        if len(widths) != len(kernel_sizes):
            raise ValueError(
                f"{len(widths)} widths and {len(kernel_sizes)} kernel_sizes. HINT: use one of each per layer."
            )
        _divisible([*widths, *hidden], group_size)
        channels, *_ = image_shape(input_shape, "NormPreservingConvNet")
        layers: list[nn.Module] = []
        for i, (width, kernel) in enumerate(zip(widths, kernel_sizes, strict=True)):
            layer = nn.Conv2d(channels, width, kernel, stride=kernel, bias=False)
            layers += [_orthogonal(layer, channels * kernel**2, width, f"convolution {i}"), GroupSort(group_size)]
            channels = width
        if pool > 1:
            layers.append(ScaledL2Pool2d(pool))
        self.features = nn.Sequential(*layers)
        size = math.prod(feature_shape(self.features, input_shape, "NormPreservingConvNet"))
        self.head = nn.Sequential(*_dense([size, *hidden, outputs], group_size))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def _divisible(widths: Sequence[int], group_size: int) -> None:
    wrong = [width for width in widths if group_size < 1 or width % group_size]
    if wrong:
        raise ValueError(f"widths {wrong} do not split into groups of {group_size}. HINT: use multiples of group_size.")
