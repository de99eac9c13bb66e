"""Puts pairs of channels in order, and the gradient back: the activation MaxMin.

torch's maximum and minimum keep both of their arguments for the backward pass and take a dozen passes over memory
there. Here one byte is kept of each pair, and both directions take one pass, by a loop on a CPU and by what torch
compiles from the definition on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .loops import Fused, cpu_loops, is_traced, usable


def larger_first(x: Tensor) -> Tensor:
    """Returns ``x`` (batch, channels, ...) with the channels 2k and 2k + 1 in descending order.

    Each example's output is a permutation of its entries, and the gradient is permuted back by the same one, also where
    the two of a pair are equal, so both maps keep norms exactly. A pair with a NaN stays as it is.

    Raises:
        ValueError: If the number of channels is odd.
    """
    if x.shape[1] % 2:  # or channels of different examples would be paired
        raise ValueError(f"{x.shape[1]} channels do not make pairs. HINT: use an even number of channels.")
    if is_traced():
        return ordered_by_torch(x)[0]
    ordered: Tensor = _LargerFirst.apply(x, usable(x.detach()))
    return ordered


def ordered_by_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``x`` in order, and for every pair of channels and position whether the two have changed places."""
    first, second = torch.unflatten(x, 1, (-1, 2)).unbind(2)
    swapped = second > first
    return swapped_by_torch(x, swapped), swapped


def swapped_by_torch(x: Tensor, swapped: Tensor) -> Tensor:
    """Returns ``x`` with the two channels of a pair exchanged where ``swapped`` says so."""
    first, second = torch.unflatten(x, 1, (-1, 2)).unbind(2)
    return torch.stack((torch.where(swapped, second, first), torch.where(swapped, first, second)), 2).flatten(1, 2)


_ordered, _exchanged = Fused(ordered_by_torch), Fused(swapped_by_torch)


class _LargerFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by_loop: bool) -> Tensor:
        if by_loop:
            rows, channels, *rest = x.shape
            out, swapped = torch.empty_like(x), torch.empty((rows, channels // 2, *rest), dtype=torch.bool)
            pairs = (rows * (channels // 2), 2, math.prod(rest))
            cpu_loops().in_order(x.numel(), x.detach().view(pairs), out.view(pairs), swapped.view(pairs[::2]))
        else:
            out, swapped = _ordered(x)
        ctx.save_for_backward(swapped)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (swapped,) = ctx.saved_tensors
        # as a function of its own only where it is to be differentiated in its turn
        found: Tensor = (_Swap.apply if torch.is_grad_enabled() else _swapped)(gradient, swapped)
        return found, None


class _Swap(torch.autograd.Function):
    """Exchanges channels: linear, and its own adjoint, so gradients of every order are the same permutation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, swapped: Tensor) -> Tensor:
        ctx.save_for_backward(swapped)
        return _swapped(x, swapped)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (swapped,) = ctx.saved_tensors
        found: Tensor = _Swap.apply(gradient, swapped)
        return found, None


def _swapped(x: Tensor, swapped: Tensor) -> Tensor:
    if not (usable(x) and swapped.is_contiguous()):
        found: Tensor = _exchanged(x, swapped)
        return found
    out, (rows, channels, *rest) = torch.empty_like(x), x.shape
    pairs = (rows * (channels // 2), 2, math.prod(rest))
    cpu_loops().swap(x.numel(), x.detach().view(pairs), swapped.view(pairs[::2]), out.view(pairs))
    return out
