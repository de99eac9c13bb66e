"""Compiled loops: the same bits for every number of threads, on torch's own threads, and no way to misread memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lipdp_lightning.kernels import cpu, loops
from lipdp_lightning.kernels.cpu import Loop

Tensors = dict[str, Tensor]


def inputs() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        "images": torch.randn(7, 4, 9, generator=generator),
        "counts": 1 + 8 * torch.rand(9, generator=generator, dtype=torch.float64),
        "norms": torch.full((7,), torch.nan),
        "rows": torch.full((28, 9), torch.nan),
        "kept": torch.rand(28, 3, generator=generator, dtype=torch.float64),
        "pairs": torch.full((14, 2, 9), torch.nan),
        "neighbours": torch.full((126, 2, 1), torch.nan),
        "swapped": torch.randint(0, 2, (14, 9), generator=generator).bool(),
    }


def images(t: Tensors, *shape: int) -> Tensor:
    return t["images"].view(shape)


CASES: dict[str, tuple[Loop, Callable[[Tensors], tuple[Any, ...]], str]] = {
    "patch_norms": (cpu.patch_norms, lambda t: (t["images"], t["counts"], 2, 3, t["norms"]), "norms"),
    "in_order": (cpu.in_order, lambda t: (images(t, 14, 2, 9), t["pairs"], t["swapped"]), "pairs"),
    "in_order, bytes": (cpu.in_order, lambda t: (images(t, 14, 2, 9), t["pairs"], t["swapped"]), "swapped"),
    "in_order, neighbours": (
        cpu.in_order, lambda t: (images(t, 126, 2, 1), t["neighbours"], t["swapped"].view(126, 1)), "neighbours",
    ),
    "swap": (cpu.swap, lambda t: (images(t, 14, 2, 9), t["swapped"], t["pairs"]), "pairs"),
    "swap, neighbours": (
        cpu.swap, lambda t: (images(t, 126, 2, 1), t["swapped"].view(126, 1), t["neighbours"]), "neighbours",
    ),
    "normalize": (cpu.normalize, lambda t: (images(t, 28, 9), 0.2, t["rows"], t["kept"]), "rows"),
    "normalize, kept": (cpu.normalize, lambda t: (images(t, 28, 9), 0.2, t["rows"], t["kept"]), "kept"),
    "pull_back": (cpu.pull_back, lambda t: (images(t, 28, 9), t["kept"], images(t, 28, 9), t["rows"]), "rows"),
}  # fmt: skip
MANY = 1 << 20


def run(case: str, count: int) -> Tensor:
    loop, arguments, result = CASES[case]
    found, before = inputs(), torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        loop(MANY, *arguments(found))
    finally:
        torch.set_num_threads(before)
    return found[result]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [2, 3, 9])
def test_threads_do_every_part_once_and_with_the_same_bits(case: str, count: int) -> None:
    alone = run(case, 1)
    assert torch.equal(alone, run(case, count)) and not alone.isnan().any()
    assert not torch.equal(alone, inputs()[CASES[case][2]])


def test_fewer_threads_than_asked_for_do_all_parts() -> None:
    """Parts that no thread does would be left as they were."""
    code = (
        "from test_threads import CASES, cpu, run, torch\n"
        "assert cpu.openmp().omp_get_thread_limit() == 1\n"
        "for case in CASES:\n    assert torch.equal(run(case, 1), run(case, 4))\n"
    )
    environment = os.environ | {"OMP_THREAD_LIMIT": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, env=environment, check=True)


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "another dtype": lambda x: x.double(),
    "another number of dimensions": lambda x: x.flatten(1),
    "every other entry": lambda x: x[:, :, ::2],
    "a view with the other sign": lambda x: torch._neg_view(x),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_memory_that_is_not_as_a_loop_expects_is_not_read(wrong: str) -> None:
    t = inputs()
    with pytest.raises(AssertionError):
        cpu.in_order(1, WRONG[wrong](images(t, 14, 2, 9)), t["pairs"], t["swapped"])


def test_the_threads_are_torchs_own() -> None:
    before = threading.active_count()
    run("in_order", 3)
    assert threading.active_count() == before


def test_without_torchs_threads_torchs_operations_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    assert loops.usable(x)
    monkeypatch.setattr("torch.__file__", str(tmp_path / "__init__.py"))  # no library is there
    assert cpu.openmp.__wrapped__() is None
    monkeypatch.setattr(loops, "_found", lambda: False)
    assert not loops.usable(x)


def test_threads_of_python_may_run_loops_at_the_same_time() -> None:
    expected, found = run("in_order", 1), []

    def work() -> None:
        for _ in range(50):
            t = inputs()
            cpu.in_order(MANY, images(t, 14, 2, 9), t["pairs"], t["swapped"])
            found.append(torch.equal(t["pairs"], expected))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 150 and all(found)
