"""DP-SGD on two processes and in micro-batches: the sums of clipped gradients are those of one process."""

from __future__ import annotations

import pytest
from test_distributed_sums import difference, reference, tolerance
from worlds import Worlds


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["clip_flat", "clip_ghost"])
def test_clipped_sums_agree(worlds: Worlds, scaling: str) -> None:
    one = reference(worlds, scaling=scaling)
    runs = [run for chunks in (1, 3) for run in worlds.run("final_weights", 2, scaling=scaling, chunks=chunks)]
    assert max(difference(run, one) for run in runs) <= tolerance(one, "64-true")
    assert difference(one, reference(worlds)) > 1e-3, "nothing was clipped"
