"""Memory: what is alive at the set-up and what steps add, in processes that give back what they free."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lipdp_lightning.bench.compare import Effort, measure_cell
from lipdp_lightning.bench.contenders import Job
from lipdp_lightning.bench.peak_memory import Memory, available_bytes

MB = 10**6
forgets = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="needs a system that forgets peaks"
)
STEPS = """
import torch

def frees(job, between):
    kept = torch.ones(job.rows, 100)
    rows = torch.ones(job.rows, *job.network.shape)
    while True:
        for part in range(4):
            torch.ones(10_000_000)
        between()

def holds(job, between):
    steps = [torch.ones(1)]
    while True:
        between()
        steps.append(torch.ones(2_500_000))

def dies(job, between):
    between()
    if job.memory:
        raise NotImplementedError("not while memory is measured")
    while True:
        between()
"""


@forgets
def test_the_peak_is_that_since_the_set_up() -> None:
    torch.ones(50 * MB)  # 200 MB, given back
    kept, rows = torch.ones(10 * MB), torch.ones(3, 5 * MB)
    memory = Memory(torch.device("cpu"), [(3, 5 * MB)])
    memory.begin()
    assert 40 * MB <= memory.set_up < 45 * MB, "weights count, and the rows that are trained on do not"
    assert memory.peak() - memory.set_up < 20 * MB
    torch.ones(25 * MB)
    assert 95 * MB < memory.peak() - memory.set_up < 130 * MB
    available = available_bytes()
    assert available is not None and available > 0
    assert len(kept) and len(rows)


def test_tensors_that_the_collector_leaves_out_count_too() -> None:
    """A private training sets aside what is alive at its set-up, and such objects are not listed."""
    kept = torch.ones(10 * MB)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        traced = mode.from_tensor(torch.ones(10 * MB))  # as a compilation leaves them behind: it has no memory
    torch._C._set_throw_on_mutable_data_ptr(traced)
    with pytest.raises(RuntimeError):
        traced.untyped_storage().data_ptr()
    gc.freeze()  # tests/conftest.py has set aside more, which stays so
    memory = Memory(torch.device("cpu"))
    memory.begin()
    assert memory.set_up >= 40 * MB and gc.get_freeze_count() > 0
    assert len(kept) and traced is not None


@forgets
@pytest.mark.slow
def test_a_contenders_memory_is_what_its_steps_need_and_not_what_its_process_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    names = ["torch", "steps:frees", "steps:holds", "steps:dies"]
    jobs = [Job(name, "mlp-8x2", 8, memory_limit=4 * 10**9) for name in names]
    effort = Effort(rounds=2, turn_seconds=0.2, most_steps=3)
    plain, frees, holds, dies = measure_cell(jobs, effort, [*names[1:], "torch"])
    assert plain.memory_ratio == 1.0
    # 16,384 rows of 100 floats are kept; four times 40 MB are freed, one after the other
    assert frees.set_up_memory is not None and 6.5 * MB < frees.set_up_memory < 8 * MB
    assert frees.peak_memory is not None and 46 * MB < frees.peak_memory < 60 * MB
    # five steps and one before them keep 10 MB each
    assert holds.peak_memory is not None and 49 * MB < holds.peak_memory < 75 * MB
    assert dies.runs and dies.seconds is not None and dies.peak_memory is None
    assert "not while memory is measured" in dies.reason
