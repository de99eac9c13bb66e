"""Activations, normalisations of one example and pooling that torch lacks or does not bound, with their rules."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..bounds.registry import rule
from ..bounds.values import Bound, Operation, Unbounded, Value, public_number
from ..kernels.floored import floored_rows
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


class GroupNorm(nn.Module):
    """(x - mean) / max(alpha, std) over each of ``groups`` groups of channels (paper 000, equation 5).

    Lipschitz constant 1/alpha; the output of one example has norm at most sqrt(numel). A constant
    group, such as a black image, maps to zero with gradient 1/alpha and no NaN.
    """

    def __init__(self, groups: int, channels: int | None = None, alpha: float = 0.1) -> None:
        super().__init__()
        problems = []
        if groups < 1 or (channels is not None and channels % groups):
            problems.append(f"{channels} channels do not split into {groups} groups. HINT: choose a divisor")
        if not (math.isfinite(alpha) and alpha > 0):
            problems.append(f"alpha={alpha} is not positive: without a floor there is no bound. HINT: 0.1")
        if problems:
            raise ValueError("; ".join(problems))
        self.groups, self.channels, self.alpha = groups, channels, float(alpha)

    def forward(self, x: Tensor) -> Tensor:
        wide = widened(x)
        grouped = wide.reshape(x.shape[0], self._groups(x), -1) if x.shape[0] else wide.reshape(0, 1, 1)
        return floored_rows(grouped, self.alpha).reshape(x.shape).to(x.dtype)

    def _groups(self, x: Tensor) -> int:
        return self.groups

    def extra_repr(self) -> str:
        return f"groups={self.groups}, alpha={self.alpha}"


class LayerNorm(GroupNorm):
    """All of an example's entries are one group."""

    def __init__(self, alpha: float = 0.1) -> None:
        super().__init__(1, None, alpha)


class InstanceNorm(GroupNorm):
    """Every channel is a group of its own."""

    def __init__(self, alpha: float = 0.1) -> None:
        super().__init__(1, None, alpha)

    def _groups(self, x: Tensor) -> int:
        return x.shape[1]


class Centre(nn.Module):
    """Takes each example's own mean over all its entries away: an orthogonal projection."""

    def forward(self, x: Tensor) -> Tensor:
        wide = widened(x).flatten(1)
        return (wide - wide.mean(1, keepdim=True)).reshape(x.shape).to(x.dtype)


@rule(Centre)
def centre(op: Operation, x: Value) -> Bound:
    return Bound(x.norm, 1.0)


def floored_normalization(x: Value, alpha: float) -> Bound:
    """(x - mean) / max(alpha, std), by group: Lipschitz 1/alpha; a group of n numbers has norm at most sqrt(n).

    Where std > alpha the Jacobian is (I - 11^T/n - u u^T/n) / std with ||u||^2 = n: norm at most 1/std < 1/alpha.
    Where std < alpha it is (I - 11^T/n) / alpha.
    """
    return Bound(min(math.sqrt(x.numel), x.norm / alpha), 1.0 / alpha)


@rule(GroupNorm, LayerNorm, InstanceNorm)
def group_norm(op: Operation, x: Value) -> Bound:
    assert isinstance(op.module, GroupNorm)
    if not isinstance(op.module, LayerNorm | InstanceNorm) and x.shape[0] % op.module.groups:
        raise Unbounded(f"{x.shape[0]} channels do not split into {op.module.groups} groups", "choose a divisor")
    return floored_normalization(x, op.module.alpha)


class ScaledL2Pool2d(nn.Module):
    """The l2 norm of every non-overlapping window: 1-Lipschitz, and the example's norm is preserved.

    It is l2 average pooling times the root of the window's size. At an all-zero window the gradient is zero.
    """

    def __init__(self, kernel_size: int = 2) -> None:
        super().__init__()
        if kernel_size < 1:
            raise ValueError(f"kernel_size={kernel_size} is not positive. HINT: 2.")
        self.kernel_size = kernel_size

    def forward(self, x: Tensor) -> Tensor:
        k = self.kernel_size
        windows = torch.unflatten(torch.unflatten(x, 3, (-1, k)), 2, (-1, k))
        # in float32 the squares of entries near 1e-23 lose their digits, and the gradient exceeds its bound by 1.2
        return torch.linalg.vector_norm(windows, dim=(3, 5), dtype=torch.float64).to(x.dtype)


@rule(ScaledL2Pool2d)
def scaled_l2_pool(op: Operation, x: Value) -> Bound:
    assert isinstance(op.module, ScaledL2Pool2d)
    if len(x.shape) != 3 or x.shape[1] % op.module.kernel_size or x.shape[2] % op.module.kernel_size:
        raise Unbounded(
            f"an example of shape {x.shape} does not split into windows", "choose a kernel_size that divides"
        )
    return Bound(x.norm, 1.0)
