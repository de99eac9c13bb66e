"""Normalisation of one example with a floored divisor, max(alpha, std), and no trained affine map."""

from __future__ import annotations

import math

from torch import Tensor, nn

from ..bounds.registry import rule
from ..bounds.values import Bound, Operation, Unbounded, Value
from ..kernels.floored import floored_rows
from ..kernels.precision import widened


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
