"""Defines the parts that several networks share: activations, pooling and residual blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..layers import GroupNorm, MaxMin, Residual, ScaledL2Pool2d

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "maxmin": MaxMin}
POOLINGS: dict[str, type[nn.Module]] = {"max": nn.MaxPool2d, "average": nn.AvgPool2d, "l2": ScaledL2Pool2d}


def activation(name: str) -> nn.Module:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} is unknown. HINT: use one of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]()


def pooling(name: str, size: int) -> nn.Module:
    """Returns a pooling with windows that do not overlap: Lipschitz 1 for max and l2, 1/size for average."""
    if name not in POOLINGS:
        raise ValueError(f"pooling={name!r} is unknown. HINT: use one of {', '.join(POOLINGS)}.")
    return POOLINGS[name](size)


def image_shape(input_shape: Sequence[int], network: str) -> tuple[int, int, int]:
    shape = tuple(int(n) for n in input_shape)
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"{network}: input_shape={shape} is not an image. HINT: give (channels, height, width).")
    return shape[0], shape[1], shape[2]


def feature_shape(layers: nn.Module, input_shape: Sequence[int], network: str) -> tuple[int, ...]:
    """Returns the shape of one example behind ``layers``."""
    try:
        with torch.no_grad():
            return tuple(layers(torch.zeros(1, *input_shape)).shape[1:])
    except RuntimeError as error:
        raise ValueError(
            f"{network}: images of {tuple(input_shape)} do not pass its layers: {str(error).splitlines()[0]} "
            "HINT: use larger images, or fewer stages."
        ) from error


def convolution_stage(
    before: int, after: int, kernel_size: int, activation_name: str, norm_groups: int, norm_alpha: float,
    bias: bool = True, stride: int = 1, padding: int | None = None,
) -> list[nn.Module]:  # fmt: skip
    """Returns a convolution, a group normalisation with a floored divisor unless norm_groups is 0, and an
    activation.
    """
    padding = kernel_size // 2 if padding is None else padding
    layers: list[nn.Module] = [nn.Conv2d(before, after, kernel_size, stride, padding, bias=bias)]
    if norm_groups:
        layers.append(GroupNorm(norm_groups, after, norm_alpha))
    return [*layers, activation(activation_name)]


def residual_block(
    before: int, after: int, stride: int, norm_groups: int, norm_alpha: float, activation_name: str = "relu"
) -> nn.Module:
    """Returns a pre-activation block; averaging body and shortcut keeps a non-expansive body non-expansive."""
    body: list[nn.Module] = []
    for channels, step in ((before, stride), (after, 1)):
        if norm_groups:
            body.append(GroupNorm(norm_groups, channels, norm_alpha))
        body += [activation(activation_name), nn.Conv2d(channels, after, 3, stride=step, padding=1)]
    shortcut = None if before == after and stride == 1 else nn.Conv2d(before, after, 1, stride=stride)
    return Residual(nn.Sequential(*body), shortcut, body_scale=0.5, shortcut_scale=0.5)
