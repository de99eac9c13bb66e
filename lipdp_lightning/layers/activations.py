"""Activations that torch lacks: GroupSort, Householder and the tempered sigmoid."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..bounds.registry import rule
from ..bounds.values import Bound, Operation, Unbounded, Value, public_number
from ..kernels.pairs import larger_first
from ..kernels.precision import widened


def _grouped(x: Value, size: int) -> None:
    if x.shape[0] % size:
        raise Unbounded(f"{x.shape[0]} channels do not split into groups of {size}", "choose a multiple")


class GroupSort(nn.Module):
    """Sorts the channels within groups of ``group_size``: 1-Lipschitz and norm preserving."""

    def __init__(self, group_size: int = 2) -> None:
        super().__init__()
        if group_size < 1:
            raise ValueError(f"group_size={group_size} is not positive. HINT: 2 is MaxMin.")
        self.group_size = group_size

    def forward(self, x: Tensor) -> Tensor:
        if self.group_size == 2:
            return larger_first(x)
        return torch.unflatten(x, 1, (-1, self.group_size)).sort(2).values.flatten(1, 2)


class MaxMin(GroupSort):
    """GroupSort in pairs, the larger channel first."""

    def __init__(self) -> None:
        super().__init__(2)


class Householder(nn.Module):
    """Reflects each pair of channels across a fixed, public line when it lies on the line's negative side.

    A continuous choice between the identity and a reflection: 1-Lipschitz and norm preserving.
    """

    def __init__(self, angle: float = math.pi / 2) -> None:
        super().__init__()
        self.angle = float(angle)

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.unflatten(widened(x), 1, (-1, 2)).unbind(2)
        sine, cosine = math.sin(self.angle), math.cos(self.angle)
        keep = a * math.sin(self.angle / 2) - b * math.cos(self.angle / 2) > 0
        first = torch.where(keep, a, cosine * a + sine * b)
        second = torch.where(keep, b, sine * a - cosine * b)
        return torch.stack((first, second), 2).flatten(1, 2).to(x.dtype)


class TemperedSigmoid(nn.Module):
    """scale * sigmoid(temperature * x) - offset; scale 2, temperature 2, offset 1 is tanh."""

    def __init__(self, scale: float = 2.0, temperature: float = 2.0, offset: float = 1.0) -> None:
        super().__init__()
        self.scale, self.temperature, self.offset = float(scale), float(temperature), float(offset)

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * torch.sigmoid(self.temperature * widened(x)) - self.offset).to(x.dtype)


@rule(GroupSort)
def group_sort(op: Operation, x: Value) -> Bound:
    assert isinstance(op.module, GroupSort)
    _grouped(x, op.module.group_size)
    return Bound(x.norm, 1.0)


@rule(Householder)
def householder(op: Operation, x: Value) -> Bound:
    assert isinstance(op.module, Householder)
    public_number(op.module.angle)
    _grouped(x, 2)
    return Bound(x.norm, 1.0)


@rule(TemperedSigmoid)
def tempered_sigmoid(op: Operation, x: Value) -> Bound:
    assert isinstance(op.module, TemperedSigmoid)
    scale, offset = public_number(op.module.scale), public_number(op.module.offset)
    largest = max(abs(scale - offset), abs(offset))
    return Bound(math.sqrt(x.numel) * largest, abs(scale * public_number(op.module.temperature)) / 4)
