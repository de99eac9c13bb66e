"""The rows of each micro-batch: a pure function of the secret, the step and the process's place."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

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
