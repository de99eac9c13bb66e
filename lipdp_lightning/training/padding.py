"""Batches of few different sizes: rows of zeros are appended to a Poisson sample, and contribute nothing.

The size of a Poisson sample is another one in almost every step. Libraries of convolutions keep what they prepare for a
size, and an allocator the blocks of it: unpadded, a training takes longer and its memory grows with the steps.

Guarantee: the loss is of the sample's rows alone, so that the cotangent of a row that was appended is exactly zero, and
zero times what is finite adds nothing to a sum. No example's row depends on how many follow it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def padding_multiple(network: nn.Module, expected_rows: float, views: int = 1) -> int:
    """What the number of rows is rounded up to: about half a standard deviation of the sample's size, a power of two.

    1 for a network without convolutions, which has nothing to prepare.
    """
    if expected_rows < 4 or not any(isinstance(m, _CONVOLUTIONS) for m in network.modules()):
        return 1
    return math.lcm(views, 1 << max(0, math.floor(math.log2(expected_rows) / 2) - 1))


def with_empty_rows(x: Tensor, multiple: int) -> Tensor:
    """x, with rows of zeros up to the next multiple; an empty batch stays empty."""
    missing = -len(x) % multiple
    return x if missing == 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
