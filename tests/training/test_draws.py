"""Samples that are drawn some steps at once are those of their steps, whichever step is asked for next."""

from __future__ import annotations

import pytest
import torch
from small_runs import make_plan

from lipdp_lightning.privacy.sampling import local_slice, poisson_sample
from lipdp_lightning.training import batches

SECRET = bytes(range(16))


@pytest.mark.parametrize("at_once", [1, 250, 1 << 20])
@pytest.mark.parametrize(("rank", "world", "chunks"), [(0, 1, 1), (1, 3, 2)])
def test_every_step_has_its_own_sample(
    monkeypatch: pytest.MonkeyPatch, at_once: int, rank: int, world: int, chunks: int
) -> None:
    monkeypatch.setattr(batches, "_AT_ONCE", at_once)
    plan = make_plan()
    draw = batches.planned_draws(SECRET, plan, 100, rank, world, chunks)
    for step in (0, 1, 2, 17, 18, 5, 40, 39, 0):
        sample = poisson_sample(SECRET, step, 100, plan.sample_rate)
        for chunk in range(chunks):
            assert torch.equal(draw(step, chunk), local_slice(sample, rank, world, chunk, chunks))


def test_large_tables_are_drawn_a_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(secret: bytes, step: int, rows: int, rate: float) -> torch.Tensor:
        asked.append(step)
        return torch.arange(2)

    monkeypatch.setattr(batches, "poisson_sample", counted)
    batches.planned_draws(SECRET, make_plan(), 1 << 21, 0, 1, 1)(3, 0)
    assert asked == [3]
    batches.planned_draws(SECRET, make_plan(), 1 << 18, 0, 1, 1)(3, 0)
    assert asked == [3, 3, 4, 5, 6]
