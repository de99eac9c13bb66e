"""Squared norms of examples, and of the patches that a convolution sees of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from ..threads import threads_for
from .precision import widened

_AT_ONCE = 1 << 18  # numbers
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def squared_norms(rows: Tensor) -> Tensor:
    """Squared l2 norm of each example, in float32 at least.

    torch.sum adds pairwise; vector_norm adds one by one and is off by 1e-4 on a constant image of 224 x 224.
    """
    return _by_example(rows, lambda part: widened(part).square().unsqueeze(-1).flatten(1).sum(1))


def row_norms(rows: Tensor, more: int = 0) -> Tensor:
    """sqrt(||row||^2 + more) of each example, in float32 at least."""
    if not read_by_loops(rows):
        return (squared_norms(rows) + more).sqrt()
    found, shape = torch.empty(rows.shape[0], dtype=torch.float32), row_shape(rows)
    loops().row_norms.at(threads_for(rows.numel()), rows.data_ptr(), *shape, more, found.data_ptr(), shape[0])
    return found


def patch_energies(images: Tensor, counts: Tensor, groups: int) -> Tensor:
    """Of each image, the sum over channels and pixels of counts[pixel] * value^2; of several groups the largest."""

    def largest_group(part: Tensor) -> Tensor:
        energy = torch.unflatten(widened(part).square(), 1, (groups, -1)).sum(2)
        # not a matrix product, which autocast would round
        return (energy * counts.to(energy.dtype)).flatten(2).sum(2).amax(1)

    return _by_example(images, largest_group)


def patch_norms(images: Tensor, counts: Tensor, groups: int, more: int = 0) -> Tensor:
    """The root of those energies and ``more``."""
    if not read_by_loops(images):
        return (patch_energies(images, counts, groups) + more).sqrt()
    found, weights = torch.empty(images.shape[0], dtype=torch.float32), counts.double().contiguous()
    shape = images.shape
    loops().patch_norms.at(
        threads_for(images.numel()), images.data_ptr(), *shape[:2], math.prod(shape[2:]), weights.data_ptr(),
        weights.numel(), groups, more, found.data_ptr(), shape[0],
    )  # fmt: skip
    return found


def row_shape(rows: Tensor) -> Sequence[int]:
    """Each row as one axis."""
    shape = rows.shape
    return shape if len(shape) == 2 else (shape[0], math.prod(shape[1:]))


def read_by_loops(*tensors: Tensor) -> bool:
    """Whether no gradient flows through what is made of them, and they lie in a CPU's memory as float32."""
    if is_traced():
        return False
    followed = torch.is_grad_enabled()
    for tensor in tensors:
        if (followed and tensor.requires_grad) or type(tensor) not in _PLAIN_TYPES or not is_plain_single(tensor):
            return False
    return True


def is_plain_single(values: Tensor) -> bool:
    """Tells whether values are float32 and contiguous in a CPU's memory, and not with the other sign."""
    return values.dtype == torch.float32 and values.is_cpu and values.is_contiguous() and not values.is_neg()


def is_traced() -> bool:
    """Whether a compiler or torch.func looks on: neither sees what a loop does."""
    return torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None


@lru_cache(maxsize=1)
def loops() -> ModuleType:
    """Compiled when they are asked for first: not for a command that trains nothing."""
    from . import energy_loops

    return energy_loops


@lru_cache(maxsize=1)
def scaling_loops() -> ModuleType:
    from . import row_loops

    return row_loops


def _by_example(rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """function(rows), on a CPU of some examples at a time: their squares stay in its cache, and take no memory."""
    some = max(1, _AT_ONCE // max(1, rows[:1].numel()))
    if rows.shape[0] <= some or rows.device.type != "cpu" or torch.compiler.is_compiling():
        return function(rows)
    return torch.cat([function(part) for part in torch.split(rows, some)])
