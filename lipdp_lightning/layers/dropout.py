"""Dropout whose masks belong to examples, not to rows of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..bounds.registry import rule
from ..bounds.rules.activations import dropout

_MULTIPLIERS = (-49064778989728563, -4265267296055464877)  # odd 64-bit constants of the splitmix64 finaliser
_GOLDEN = -7046029254386353131


def mixed_bits(key: int, ids: Tensor, count: int) -> Tensor:
    """Returns (len(ids), count) pseudo-random 64-bit integers, each a function of (key, id, position) alone."""
    position = torch.arange(1, count + 1, device=ids.device, dtype=torch.int64) * _GOLDEN
    rows = _mix(ids.to(torch.int64) * _GOLDEN + key)
    return _mix(rows.unsqueeze(1) ^ position.unsqueeze(0))


def _mix(z: Tensor) -> Tensor:
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        z = (z ^ _logical_shift(z, shift)) * multiplier
    return z ^ _logical_shift(z, 31)


def _logical_shift(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)


class KeyedDropout(nn.Dropout):
    """nn.Dropout whose mask for an example is keyed by (secret, step, layer, example id).

    Guarantee: removing or adding an example leaves the masks of all others as they are. The privacy
    bound holds for every mask, so the keyed hash need not be cryptographic. Before each forward pass, the training
    sets ``context`` to the key of this step and layer and the example ids.
    """

    set_in_steps = ("context",)
    context: tuple[int, Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        if self.p >= 1:
            return input * 0.0
        if self.context is None:
            raise ValueError(
                "dropout in training mode has no example ids, and masks keyed by batch row are not private. "
                "HINT: train through PrivateModule, or call model.eval()."
            )
        key, ids = self.context
        if len(ids) != input.shape[0]:
            raise ValueError(
                "dropout has the ids of another number of examples than the batch has rows. "
                "HINT: train through PrivateModule, which sets them before each forward pass."
            )
        if not input.shape[0]:
            return input
        bits = mixed_bits(key, ids, input[0].numel())
        threshold = int(self.p * 2**62) * 2 - 2**62  # compares the top 63 bits of a signed integer
        keep: Any = (bits >> 1) >= threshold
        return input * keep.reshape(input.shape).to(input.dtype) / (1 - self.p)


rule(KeyedDropout)(dropout)
