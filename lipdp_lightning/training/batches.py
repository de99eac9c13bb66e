"""The rows of each micro-batch, and how many rows the network is given.

Which rows are drawn is a pure function of the secret, the step and the process's place.

The size of a Poisson sample is another one in almost every step. Libraries of convolutions keep what they prepare for a
size, and an allocator the blocks of it: without padding, a training takes longer and its memory grows with the steps.
So rows of zeros are appended to the sample where the network has convolutions.

Guarantee: the loss is of the sample's rows alone, so that the cotangent of a row that was appended is exactly zero, and
zero times what is finite adds nothing to a sum. No example's row depends on how many follow it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..privacy.plan import PrivacyPlan
from ..privacy.sampling import SampleCiphers, local_slice, poisson_sample

_AT_ONCE = 1 << 20  # rows that are decided on at once: what few of them cost is mostly the way there


def planned_draws(
    secret: bytes, plan: PrivacyPlan, rows: int, rank: int, world_size: int, chunks: int
) -> Callable[[int, int], Tensor]:
    """``draw(step, chunk)``: this process's share of the step's Poisson sample, possibly empty."""
    drawn: dict[int, Tensor] = {}
    ciphers = SampleCiphers(secret)
    ahead = min(16, max(1, _AT_ONCE // max(1, rows)))

    def draw(step: int, chunk: int) -> Tensor:
        if step not in drawn:
            drawn.clear()
            for later in range(step, step + ahead):
                drawn[later] = poisson_sample(ciphers, later, rows, plan.sample_rate)
        return local_slice(drawn[step], rank, world_size, chunk, chunks)

    return draw


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
