"""Padding: zeros and constants add norm, copies of pixels multiply it by the root of how many there are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..registry import rule
from ..values import Bound, Operation, Unbounded, Value, public_number


@lru_cache(maxsize=256)
def pad_copies(shape: tuple[int, ...], pad: tuple[int, ...], mode: str) -> float:
    """Largest number of copies that padding makes of one entry: what its forward makes, and what its gradient sums."""
    places = torch.arange(math.prod(shape), dtype=torch.float64).reshape(1, *shape)
    copies = torch.bincount(F.pad(places, pad, mode=mode).flatten().long(), minlength=places.numel())
    places.requires_grad_(True)
    with torch.enable_grad():
        summed = torch.autograd.grad(F.pad(places, pad, mode=mode).sum(), places)[0]
    if not torch.equal(copies.double(), summed.flatten()):
        raise Unbounded(
            f"torch's gradient of {mode} padding by {pad} is not that of what it computes",
            "pad by other widths, or crop with slices",
        )
    return float(copies.max())


def _pad(x: Value, pad: tuple[int, ...], mode: str, value: float | None, op: Operation) -> Bound:
    if len(pad) // 2 > len(x.shape):
        raise Unbounded("it pads the batch dimension", "pad dimensions of one example only")
    if len(pad) % 2 or not all(isinstance(side, int) for side in pad):
        raise Unbounded(f"its widths {pad} are not pairs of public integers", "give two integers per dimension")
    if mode == "constant":
        # negative padding crops: what is left of x may be less than all of it
        sizes = (*reversed(x.shape),)
        kept = math.prod(
            max(0, n + min(before, 0) + min(after, 0))
            for n, before, after in zip(sizes, pad[0::2], pad[1::2], strict=False)
        ) * math.prod(sizes[len(pad) // 2 :])
        extra = abs(public_number(value or 0.0)) * math.sqrt(max(0, op.output_numel - kept))
        return Bound(math.hypot(x.norm, extra), 1.0)
    if mode == "circular" and min(pad, default=0) < 0:
        raise Unbounded(
            f"circular padding by {pad} crops on one side, and torch then copies other entries than it accounts for",
            "crop with slices, then pad",
        )
    lipschitz = math.sqrt(pad_copies(x.shape, pad, mode))
    return Bound(lipschitz * x.norm, lipschitz)


@rule(F.pad, torch._C._nn.pad)
def pad_function(
    op: Operation, x: Value, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Bound:
    return _pad(x, tuple(pad), mode, value, op)


@rule(nn.ConstantPad1d, nn.ConstantPad2d)
def constant_pad(op: Operation, x: Value) -> Bound:
    module: Any = op.module
    return _pad(x, tuple(module.padding), "constant", module.value, op)


@rule(nn.CircularPad1d, nn.CircularPad2d)
def circular_pad(op: Operation, x: Value) -> Bound:
    module: Any = op.module
    return _pad(x, tuple(module.padding), "circular", None, op)


@rule(nn.ReflectionPad1d, nn.ReflectionPad2d)
def reflection_pad(op: Operation, x: Value) -> Bound:
    module: Any = op.module
    return _pad(x, tuple(module.padding), "reflect", None, op)


@rule(nn.ReplicationPad1d, nn.ReplicationPad2d)
def replication_pad(op: Operation, x: Value) -> Bound:
    module: Any = op.module
    return _pad(x, tuple(module.padding), "replicate", None, op)
