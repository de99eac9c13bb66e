"""Decisions that every rank has to take alike, at the price of one small all-reduce."""

from __future__ import annotations

from typing import Any

import torch


def agreed(strategy: Any, *votes: bool) -> list[bool]:
    """For each vote, whether any rank has cast it. Every rank has to call this at the same point of its program."""
    if strategy.world_size == 1:
        return list(votes)
    counts = torch.tensor([int(vote) for vote in votes], device=strategy.root_device)
    torch.distributed.all_reduce(counts, op=torch.distributed.ReduceOp.MAX)
    return [bool(count) for count in counts.tolist()]
