"""Peak memory counts what was held after the set-up, and nothing of before."""

from __future__ import annotations

import os

import pytest
import torch

from lipdp_lightning.bench.memory import Memory, available_bytes

MB = 10**6


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs a system that forgets peaks")
def test_the_peak_is_that_since_the_set_up() -> None:
    torch.ones(50 * MB)  # 200 MB, given back
    memory = Memory(torch.device("cpu"))
    memory.begin()
    assert memory.peak() - memory.base < 20 * MB
    torch.ones(25 * MB)
    assert 95 * MB < memory.peak() - memory.base < 130 * MB
    available = available_bytes()
    assert available is not None and available > 0
