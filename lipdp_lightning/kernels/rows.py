"""Norms of examples, and of the patches that a convolution sees of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .loops import Fused, cpu_loops, usable
from .precision import widened

_AT_ONCE = 1 << 18  # numbers whose squares are held at once


def row_norms(rows: Tensor, more: int = 0) -> Tensor:
    """Returns sqrt(||row||^2 + more) of each example, in float32 at least; NaN and infinities propagate.

    Squares are taken and added in float64, where no float32 overflows or is lost.
    """
    found: Tensor = (_row_norms if rows.is_cuda else row_norms_by_torch)(rows.unsqueeze(-1).flatten(1), more)
    return found


def row_norms_by_torch(rows: Tensor, more: int) -> Tensor:
    """Computes ``row_norms`` by torch's operations."""
    norms = torch.linalg.vector_norm(rows.unsqueeze(-1).flatten(1), dim=1, dtype=torch.float64)
    if more:
        norms = (norms.square() + more).sqrt()
    return norms.to(torch.promote_types(rows.dtype, torch.float32))


def patch_norms(images: Tensor, counts: Tensor, groups: int, more: int = 0) -> Tensor:
    """Returns the norm of all patches of each image, of the largest group of channels.

    Args:
        images: (examples, channels, ...), already padded.
        counts: for each pixel, the number of patches that hold it.
        groups: of channels, as the convolution has them; a kernel sees the patches of its own group only.
        more: is added to the squared norm: the number of positions where a bias is trained.
    """
    if not usable(images):
        norms: Tensor = (_patch_norms if images.is_cuda else patch_norms_by_torch)(images, counts, groups, more)
        return norms
    found, shape = torch.empty(images.shape[0], dtype=torch.float32), images.shape
    flat = images.reshape(shape[0], shape[1], math.prod(shape[2:]))
    weights = counts.double().contiguous().view(-1)
    cpu_loops().patch_norms(images.numel(), flat, weights, groups, more, found)
    return found


def patch_norms_by_torch(images: Tensor, counts: Tensor, groups: int, more: int) -> Tensor:
    """Computes ``patch_norms`` by torch's operations."""

    def largest_group(part: Tensor) -> Tensor:
        # not a matrix product, which autocast would round
        energy = widened(part).square() * counts.to(torch.promote_types(part.dtype, torch.float32))
        if groups == 1:
            return energy.flatten(1).sum(1)
        return torch.unflatten(energy, 1, (groups, -1)).flatten(2).sum(2).amax(1)

    return (_in_parts(images, largest_group) + more).sqrt()


def _in_parts(rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies the function to a few examples at a time on a CPU, whose squares then stay in its cache."""
    some = max(1, _AT_ONCE // max(1, rows[:1].numel())) if rows.device.type == "cpu" else len(rows)
    if rows.shape[0] <= some or torch.compiler.is_compiling():
        return function(rows)
    return torch.cat([function(part) for part in torch.split(rows, some)])


_row_norms, _patch_norms = Fused(row_norms_by_torch), Fused(patch_norms_by_torch)
