"""The pretended GPU refuses and counts what a GPU would: tests/gpu/pretend.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pretend import OnGpu, pretended_gpu, to_gpu
from torch import Tensor

REFUSED: dict[str, Callable[[Tensor], object]] = {
    "a tensor of the CPU": lambda x: x + torch.ones(3),
    "an index on the CPU": lambda x: x.index_select(0, torch.tensor([0])),
    "numpy": lambda x: x.numpy(),
    "a product with a tensor of the CPU": lambda x: torch.outer(x, torch.ones(3)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_devices_do_not_mix(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_gpu(monkeypatch), pytest.raises((RuntimeError, TypeError)):
        REFUSED[what](to_gpu(torch.ones(3)))


COUNTED: dict[str, tuple[Callable[[Tensor], object], tuple[int, int, int, int]]] = {
    "a kernel": (lambda x: x.mul(2), (1, 0, 0, 0)),
    "a view": (lambda x: x.view(3, 1).t()[0], (0, 0, 0, 0)),
    "a number for the host": (lambda x: float(x[0]), (1, 1, 0, 0)),
    "all numbers for the host": (lambda x: x.tolist(), (0, 1, 0, 0)),
    "a copy to the host": (lambda x: x.cpu(), (0, 1, 0, 12)),
    "a copy from the host": (lambda x: torch.ones(5).to(x.device), (0, 1, 20, 0)),
    "a mask": (lambda x: x[x > 0], (2, 1, 0, 0)),
    "zeros made there": (lambda x: torch.zeros(4, device=x.device), (1, 0, 0, 0)),
    "backward": (lambda x: torch.nn.Parameter(x).mul(2).sum().backward(), (4, 0, 0, 0)),
}


@pytest.mark.parametrize("what", COUNTED)
def test_launches_waits_and_bytes_are_counted(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    action, expected = COUNTED[what]
    with pretended_gpu(monkeypatch) as counts:
        x = to_gpu(torch.ones(3))
        counts.clear()
        action(x)
        found = (counts.launches, counts.waits, counts.to_device, counts.to_host)
    assert found[1:] == expected[1:] and abs(found[0] - expected[0]) <= (what == "backward") * 2, found


def test_outside_of_it_nothing_is_pretended() -> None:
    assert type(torch.ones(3) + 1) is Tensor and not isinstance(torch.zeros(2), OnGpu)
