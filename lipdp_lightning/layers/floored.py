"""(x - mean) / max(floor, deviation) of groups of numbers, by one pass forward and one backward on a CPU."""

from __future__ import annotations

import math
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..threads import threads_for
from .energies import read_by_loops


def floored_rows(grouped: Tensor, floor: float) -> Tensor:
    """``grouped`` (examples, groups, numbers), each group normalised by itself.

    Guarantee: the gradient is the exact one of this function, which has slope 1 / floor at most. A constant group goes
    to zero.
    """
    if not (read_by_loops(grouped.detach()) and grouped.numel()):
        return by_torch(grouped, floor)
    found: Tensor = _Floored.apply(grouped, floor)
    return found


def by_torch(grouped: Tensor, floor: float) -> Tensor:
    """The same of torch's operations, on any device and in any precision."""
    centred = grouped - grouped.mean(2, keepdim=True)
    # vector_norm has gradient zero at zero, where sqrt(mean square) would give NaN
    deviation = torch.linalg.vector_norm(centred, dim=2, keepdim=True) / math.sqrt(max(1, grouped.shape[2]))
    return centred / deviation.clamp_min(floor)


class _Floored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grouped: Tensor, floor: float) -> Tensor:
        examples, groups, numbers = grouped.shape
        out, kept = torch.empty_like(grouped), np.empty((examples * groups, 3))
        rows, found = (t.detach().view(-1, numbers).numpy() for t in (grouped, out))
        loops().normalize.shared(threads_for(grouped.numel()), rows, floor, found, kept)
        ctx.save_for_backward(grouped)
        ctx.kept, ctx.floor = kept, floor
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (grouped,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated in its turn
            return torch.autograd.grad(by_torch(grouped, ctx.floor), grouped, gradient, create_graph=True)[0], None
        gradient = gradient.contiguous()
        out, numbers = torch.empty_like(gradient), grouped.shape[2]
        rows, incoming, found = (t.detach().view(-1, numbers).numpy() for t in (grouped, gradient, out))
        loops().pull_back.shared(threads_for(gradient.numel()), rows, ctx.kept, incoming, found)
        return out, None


@lru_cache(maxsize=1)
def loops() -> ModuleType:
    """Compiled when they are asked for first: not for a network without such a layer."""
    from . import floored_loops

    return floored_loops
