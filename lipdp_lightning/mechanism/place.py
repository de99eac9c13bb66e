"""Where a process stands among those that share a step, and what they do together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .noise import Mode

Reduce = Callable[[Tensor], None]
Agree = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Place:
    """Where this process stands among those that share the step."""

    rank: int = 0
    world_size: int = 1
    mode: Mode = "distributed"
