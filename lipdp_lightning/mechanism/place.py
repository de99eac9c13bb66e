"""Where a process stands among those that share a step, and what they do together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .noise import Mode

Reduce = Callable[[Tensor], None]
Agree = Callable[[bytes], bytes]
Seal = Callable[[bytes], bytes]
"""From the digest of what one process is about to release to that of all of them, which is on record from then on."""


@dataclass(frozen=True)
class Place:
    """Where this process stands among those that share the step."""

    rank: int = 0
    world_size: int = 1
    mode: Mode = "distributed"
