"""Pairs of channels put in order: two passes over memory, forward and backward, and a byte for each pair in between.

Of torch's operations, maximum and minimum keep both of their arguments for the backward pass, and take a dozen passes
there.
"""

from __future__ import annotations

import math
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..threads import threads_for
from .energies import is_traced, read_by_loops


def larger_first(x: Tensor) -> Tensor:
    """Channels 2k and 2k + 1 of ``x`` (batch, channels, ...) in descending order; a pair with a NaN stays as it is.

    Guarantee: every example's output is a permutation of its entries, and the gradient is permuted back by the same
    one, also where the two of a pair are equal: both maps keep norms exactly.
    """
    if is_traced():
        return _swapped_by_torch(x, _second_is_larger(x))
    ordered: Tensor = _LargerFirst.apply(x)
    return ordered


class _LargerFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if read_by_loops(x):
            rows, channels, *rest = x.shape
            out, swapped = torch.empty_like(x), torch.empty((rows, channels // 2, *rest), dtype=torch.bool)
            pairs, of_pairs = _shapes(x)
            places = x.data_ptr(), *pairs, out.data_ptr(), *pairs, swapped.data_ptr(), *of_pairs
            loops().in_order.at(threads_for(x.numel()), *places)
        else:
            swapped = _second_is_larger(x)
            out = _swapped_by_torch(x, swapped)
        ctx.save_for_backward(swapped)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (swapped,) = ctx.saved_tensors
        # as a function of its own only where it is to be differentiated in its turn
        found: Tensor = (_Swap.apply if torch.is_grad_enabled() else _swapped)(gradient, swapped)
        return found


class _Swap(torch.autograd.Function):
    """Linear, and its own adjoint: gradients of every order are the same permutation."""

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
    if not (read_by_loops(x) and swapped.is_contiguous()):
        return _swapped_by_torch(x, swapped)
    out = torch.empty_like(x)
    pairs, of_pairs = _shapes(x)
    places = x.data_ptr(), *pairs, swapped.data_ptr(), *of_pairs, out.data_ptr(), *pairs
    loops().swap.at(threads_for(x.numel()), *places)
    return out


@lru_cache(maxsize=1)
def loops() -> ModuleType:
    """Compiled when they are asked for first: not for a network without such an activation."""
    from . import pair_loops

    return pair_loops


def _shapes(x: Tensor) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Of the pairs: how many, two, and the size of what follows the channels; and of what is known of each pair."""
    rows, channels, *rest = x.shape
    if channels % 2:  # or channels of different examples would be paired
        raise ValueError(f"{channels} channels do not make pairs. HINT: an even number of channels.")
    pairs, size = rows * (channels // 2), math.prod(rest)
    return (pairs, 2, size), (pairs, size)


def _second_is_larger(x: Tensor) -> Tensor:
    first, second = torch.unflatten(x, 1, (-1, 2)).unbind(2)
    return second > first


def _swapped_by_torch(x: Tensor, swapped: Tensor) -> Tensor:
    first, second = torch.unflatten(x, 1, (-1, 2)).unbind(2)
    return torch.stack((torch.where(swapped, second, first), torch.where(swapped, first, second)), 2).flatten(1, 2)
