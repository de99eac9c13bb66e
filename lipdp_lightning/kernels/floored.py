"""Normalises rows with a floored divisor: (x - mean) / max(floor, standard deviation)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .loops import Fused, cpu_loops, is_traced, usable


def floored_rows(grouped: Tensor, floor: float) -> Tensor:
    """Normalises ``grouped`` (examples, groups, numbers), each group by itself.

    The gradient is the exact one of this function, whose slope is at most 1 / floor. A constant group becomes zero. On
    a CPU it takes one pass over memory forward, and one backward; on a GPU, what torch compiles from the definitions.
    """
    alone = grouped.is_cuda and not is_traced()
    if not (grouped.numel() and (alone or usable(grouped.detach()))):
        return floored_by_torch(grouped, floor)
    found: Tensor = _Floored.apply(grouped, floor)
    return found


def floored_by_torch(grouped: Tensor, floor: float) -> Tensor:
    """Computes ``floored_rows`` by torch's operations, on any device and in any precision."""
    centred = grouped - grouped.mean(2, keepdim=True)
    # vector_norm has gradient zero at zero, where sqrt(mean square) would give NaN
    deviation = torch.linalg.vector_norm(centred, dim=2, keepdim=True) / math.sqrt(max(1, grouped.shape[2]))
    return centred / deviation.clamp_min(floor)


def pulled_back_by_torch(grouped: Tensor, gradient: Tensor, floor: float) -> Tensor:
    """Returns (g - mean(g) - u mean(u g)) / divisor, the gradient of ``floored_by_torch``, with u for its output.

    The last term is left out where the divisor is the floor.
    """
    centred = grouped - grouped.mean(2, keepdim=True)
    deviation = torch.linalg.vector_norm(centred, dim=2, keepdim=True) / math.sqrt(max(1, grouped.shape[2]))
    divisor = deviation.clamp_min(floor)
    out = centred / divisor
    slope = torch.where(deviation < floor, 0.0, (gradient * out).mean(2, keepdim=True))
    return (gradient - gradient.mean(2, keepdim=True) - out * slope) / divisor


_floored, _pulled_back = Fused(floored_by_torch), Fused(pulled_back_by_torch)


class _Floored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grouped: Tensor, floor: float) -> Tensor:
        ctx.floor, ctx.by_loop = floor, usable(grouped.detach())
        if not ctx.by_loop:
            ctx.save_for_backward(grouped)
            found: Tensor = _floored(grouped, floor)
            return found
        examples, groups, numbers = grouped.shape
        out, kept = torch.empty_like(grouped), torch.empty((examples * groups, 3), dtype=torch.float64)
        cpu_loops().normalize(grouped.numel(), grouped.detach().view(-1, numbers), floor, out.view(-1, numbers), kept)
        ctx.save_for_backward(grouped, kept)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        grouped, *rest = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated in its turn
            again = floored_by_torch(grouped, ctx.floor)
            return torch.autograd.grad(again, grouped, gradient, create_graph=True)[0], None
        if not ctx.by_loop:
            return _pulled_back(grouped, gradient, ctx.floor), None
        (kept,) = rest
        gradient, numbers = gradient.contiguous(), grouped.shape[2]
        out = torch.empty_like(gradient)
        rows, incoming = grouped.detach().view(-1, numbers), gradient.view(-1, numbers)
        cpu_loops().pull_back(gradient.numel(), rows, kept, incoming, out.view(-1, numbers))
        return out, None
