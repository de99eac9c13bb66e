"""How many threads a loop is worth."""

from __future__ import annotations

import torch

_WORTH_SHARING = 1 << 15  # entries: fewer are done before another thread has begun


def threads_for(entries: int) -> int:
    """As many as torch computes with, for as many entries as one thread would take some ten microseconds for."""
    return 1 if entries < _WORTH_SHARING else torch.get_num_threads()
