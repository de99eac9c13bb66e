"""Activations, normalisations of one example, pooling and residual blocks that torch lacks or does not bound."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..bounds.registry import Bound, Operation, Unbounded, Value, public_number, rule
from ..kernels.rows import floored_rows, larger_first, widened


def _grouped(x: Value, size: int) -> None:
    if x.shape[0] % size:
        raise Unbounded(f"{x.shape[0]} channels do not split into groups of {size}", "choose a multiple")


class GroupSort(nn.Module):
    """Sorts the channels within groups of ``group_size``; it is 1-Lipschitz and preserves the norm."""

    def __init__(self, group_size: int = 2) -> None:
        super().__init__()
        if group_size < 1:
            raise ValueError(f"group_size={group_size} is not positive. HINT: use 2, as MaxMin does.")
        self.group_size = group_size

    def forward(self, x: Tensor) -> Tensor:
        if self.group_size == 2:
            return larger_first(x)
        return torch.unflatten(x, 1, (-1, self.group_size)).sort(2).values.flatten(1, 2)


class MaxMin(GroupSort):
    """Sorts pairs of channels, the larger channel first."""

    def __init__(self) -> None:
        super().__init__(2)


class Householder(nn.Module):
    """Reflects each pair of channels across a fixed, public line if it lies on the line's negative side.

    The map is continuous, 1-Lipschitz and preserves the norm.
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
    """Computes scale * sigmoid(temperature * x) - offset; scale 2, temperature 2 and offset 1 give tanh."""

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
    """Computes (x - mean) / max(alpha, std) over each of ``groups`` groups of channels (paper 000, equation 5).

    The Lipschitz constant is 1/alpha, and the output of one example has norm at most sqrt(numel). A constant
    group, such as a black image, maps to zero, and its gradient is finite.
    """

    def __init__(self, groups: int, channels: int | None = None, alpha: float = 0.1) -> None:
        super().__init__()
        problems = []
        if groups < 1 or (channels is not None and channels % groups):
            problems.append(f"{channels} channels do not split into {groups} groups. HINT: choose a divisor")
        if not (math.isfinite(alpha) and alpha > 0):
            problems.append(f"alpha={alpha} is not positive: without a floor there is no bound. HINT: use 0.1")
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
    """GroupNorm with all of an example's entries in one group."""

    def __init__(self, alpha: float = 0.1) -> None:
        super().__init__(1, None, alpha)


class InstanceNorm(GroupNorm):
    """GroupNorm with every channel in a group of its own."""

    def __init__(self, alpha: float = 0.1) -> None:
        super().__init__(1, None, alpha)

    def _groups(self, x: Tensor) -> int:
        return x.shape[1]


class Centre(nn.Module):
    """Subtracts from each example the mean of its entries, which is an orthogonal projection."""

    def forward(self, x: Tensor) -> Tensor:
        wide = widened(x).flatten(1)
        return (wide - wide.mean(1, keepdim=True)).reshape(x.shape).to(x.dtype)


@rule(Centre)
def centre(op: Operation, x: Value) -> Bound:
    return Bound(x.norm, 1.0)


def floored_normalization(x: Value, alpha: float) -> Bound:
    """Bounds (x - mean) / max(alpha, std) by group: 1/alpha-Lipschitz, and a group of n numbers has norm <= sqrt(n).

    If std > alpha, the Jacobian is (I - 11^T/n - u u^T/n) / std with ||u||^2 = n, of norm at most 1/std < 1/alpha.
    If std < alpha, it is (I - 11^T/n) / alpha.
    """
    return Bound(min(math.sqrt(x.numel), x.norm / alpha), 1.0 / alpha)


@rule(GroupNorm, LayerNorm, InstanceNorm)
def group_norm(op: Operation, x: Value) -> Bound:
    assert isinstance(op.module, GroupNorm)
    if not isinstance(op.module, LayerNorm | InstanceNorm) and x.shape[0] % op.module.groups:
        raise Unbounded(f"{x.shape[0]} channels do not split into {op.module.groups} groups", "choose a divisor")
    return floored_normalization(x, op.module.alpha)


class ScaledL2Pool2d(nn.Module):
    """Computes the l2 norm of every non-overlapping window, which is 1-Lipschitz and preserves the example's norm.

    The result is l2 average pooling times the square root of the window's size. The gradient of an all-zero window is
    zero.
    """

    def __init__(self, kernel_size: int = 2) -> None:
        super().__init__()
        if kernel_size < 1:
            raise ValueError(f"kernel_size={kernel_size} is not positive. HINT: use 2.")
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


class Residual(nn.Module):
    """Computes shortcut_scale * shortcut(x) + body_scale * body(x).

    With scales of 1/2, a 1-Lipschitz shortcut and a 1-Lipschitz body give a 1-Lipschitz block.
    """

    def __init__(
        self,
        body: nn.Module,
        shortcut: nn.Module | None = None,
        body_scale: float = 1.0,
        shortcut_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut if shortcut is not None else nn.Identity()
        self.body_scale, self.shortcut_scale = float(body_scale), float(shortcut_scale)

    def forward(self, x: Tensor) -> Tensor:
        straight = self.shortcut(x)
        if self.shortcut_scale != 1.0:
            straight = straight * self.shortcut_scale
        bent = self.body(x)
        if self.body_scale != 1.0:
            bent = bent * self.body_scale
        return straight + bent
