"""Normalisations that stand in for torch's: with a floor under the divisor, or with constants for all statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..layers import GroupNorm, InstanceNorm, LayerNorm


class FlooredNorm(nn.Module):
    """Normalises each example with a floor under the divisor, then scales and shifts it by constants.

    Scale, shift and statistics are those of the module that it stands for, under their names, so that a state_dict of
    the original loads. They are not trained. An activation that the original applies is applied here, too.

    Args:
        original: The normalisation that this one stands for.
        norm: A normalisation of ``lipdp_lightning.layers``, or one of this module's that calls it.
        channels_first: Whether the scale acts along the first dimension after the batch, or along the last one.
    """

    weight: Tensor | None
    bias: Tensor | None
    act: nn.Module

    def __init__(self, original: nn.Module, norm: nn.Module, channels_first: bool) -> None:
        super().__init__()
        adopt(self, original)
        self.norm, self.channels_first = norm, channels_first

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.channels_first:
            x = x.movedim(1, -1)
        if self.weight is not None:
            x = x * self.weight
        if self.bias is not None:
            x = x + self.bias
        after: Tensor = self.act(x.movedim(-1, 1) if self.channels_first else x)
        return after


class RunningNorm(nn.Module):
    """Computes batch normalisation with its running statistics as constants: a scale and a shift of each channel.

    Args:
        original: The batch normalisation, which keeps running statistics.
    """

    running_mean: Tensor
    running_var: Tensor
    inverse_deviation: Tensor
    weight: Tensor | None
    bias: Tensor | None
    act: nn.Module

    def __init__(self, original: Any) -> None:
        super().__init__()
        adopt(self, original)
        self.eps = float(original.eps)
        self.register_buffer("inverse_deviation", torch.rsqrt(self.running_var + self.eps), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = (x.movedim(1, -1) - self.running_mean) * self.inverse_deviation
        if self.weight is not None:
            x = x * self.weight
        if self.bias is not None:
            x = x + self.bias
        after: Tensor = self.act(x.movedim(-1, 1))
        return after

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.inverse_deviation = torch.rsqrt(self.running_var + self.eps)


class ChannelScale(nn.Module):
    """Multiplies the channels of an image by constants, as timm's LayerScale2d does.

    Args:
        original: The module that holds ``gamma``.
    """

    gamma: Tensor

    def __init__(self, original: Any) -> None:
        super().__init__()
        adopt(self, original)

    def forward(self, x: Tensor) -> Tensor:
        return (x.movedim(1, -1) * self.gamma).movedim(-1, 1)


class FlooredLastNorm(nn.Module):
    """Normalises the last dimension of one example at every position, as nn.LayerNorm(channels) does, with a floor.

    Args:
        shape: The shape of one example.
        alpha: The floor of the divisor.
    """

    def __init__(self, shape: tuple[int, ...], alpha: float) -> None:
        super().__init__()
        self.positions = shape[:-1]
        self.norm = InstanceNorm(alpha) if self.positions else LayerNorm(alpha)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.positions) < 2:
            flat: Tensor = self.norm(x)
            return flat
        return self.norm(x.flatten(1, len(self.positions))).unflatten(1, self.positions)


class FlooredChannelNorm(nn.Module):
    """Normalises the channels of an image at every pixel with a floor, as a LayerNorm2d does without.

    Args:
        shape: The shape (channels, height, width) of one example.
        alpha: The floor of the divisor.
    """

    def __init__(self, shape: tuple[int, ...], alpha: float) -> None:
        super().__init__()
        self.norm = FlooredLastNorm((*shape[1:], shape[0]), alpha)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def channel_groups(channels: int) -> int:
    """Returns the number of groups that stand in for one channel each: a divisor of at most 32, of 4 or more channels.

    A group of one channel would be constant, and so map to zero, where an image is one pixel.
    """
    return max(g for g in range(1, 33) if channels % g == 0 and (channels // g >= 4 or g == 1))


def floored_groups(original: Any, channels: int, groups: int, alpha: float) -> FlooredNorm:
    """Returns a normalisation over groups of channels with the scale and shift of the original."""
    return FlooredNorm(original, GroupNorm(groups, channels, alpha), channels_first=True)


def adopt(fresh: Any, original: Any) -> None:
    """Takes over the parameters, buffers and activation of a module under their names, none of them trained.

    A scale of zero, with which residual branches often begin, would stay zero for ever, and becomes one.
    """
    for name in ("weight", "bias"):
        fresh.register_parameter(name, None)
    for name, parameter in original._parameters.items():
        fresh.register_parameter(name, None if parameter is None else parameter.requires_grad_(False))
    if lets_nothing_pass(original):
        with torch.no_grad():
            fresh.weight.fill_(1.0)
    for name, buffer in original._buffers.items():
        fresh.register_buffer(name, buffer, persistent=name not in original._non_persistent_buffers_set)
    fresh.act = getattr(original, "act", None) or nn.Identity()
    keep_settings(fresh, original)


def keep_settings(fresh: nn.Module, original: nn.Module) -> None:
    """Takes over the numbers and texts among the attributes of a module, which the model around it may read."""
    for name, value in vars(original).items():
        if not name.startswith("_") and isinstance(value, bool | int | float | str | tuple):
            setattr(fresh, name, value)


def lets_nothing_pass(original: nn.Module) -> bool:
    """Returns whether the scale of a normalisation is zero, so that nothing passes it."""
    weight = original._parameters.get("weight")
    return weight is not None and not bool(weight.detach().any())
