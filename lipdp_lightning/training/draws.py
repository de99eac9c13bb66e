"""The rows of each micro-batch: a pure function of the secret, the step and the process's place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..privacy.plan import PrivacyPlan
from ..privacy.sampling import local_slice, poisson_sample


def planned_draws(
    secret: bytes, plan: PrivacyPlan, rows: int, rank: int, world_size: int, chunks: int
) -> Callable[[int, int], Tensor]:
    """``draw(step, chunk)``: this process's share of the step's Poisson sample, possibly empty."""
    drawn = {-1: torch.empty(0, dtype=torch.int64)}

    def draw(step: int, chunk: int) -> Tensor:
        if step not in drawn:
            drawn.clear()
            drawn[step] = poisson_sample(secret, step, rows, plan.sample_rate)
        return local_slice(drawn[step], rank, world_size, chunk, chunks)

    return draw
