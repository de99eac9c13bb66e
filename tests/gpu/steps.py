"""Private steps of a network on the CPU, and the same steps on the pretended GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import pytest
import torch
from pretend import Counts, OnGpu, counts, module_to_gpu, to_gpu
from private_step import SECRET, Batch, Harness
from torch import Tensor, nn

from lipdp_lightning.mechanism.step import Mechanism
from lipdp_lightning.norms.follow import Follower
from lipdp_lightning.privacy.plan import PrivacyPlan


class SameNoise(Mechanism):
    """Keys the noise by the step alone: weights on two devices differ in their last bits, and noise would, too."""

    def privatize_(self, step: int, *_: Any, **__: Any) -> None:
        super().privatize_(step, seal=lambda own: b"0" * 32)


def take_exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluates the norm of every weight that has moved: bounds that are followed differ between devices."""
    monkeypatch.setattr("private_step.Follower", partial(Follower, 1e-4))


@dataclass
class Taken:
    """What some steps ended with, and what each phase of the last one asked of the device."""

    weights: list[Tensor]
    phases: dict[str, Counts]


def take_steps(
    network: nn.Module,
    shape: tuple[int, ...],
    plan: PrivacyPlan,
    batches: list[Batch],
    *,
    on_gpu: bool,
    chunks: int = 1,
    rate: float = 0.05,
) -> Taken:
    """Trains a copy of a network for one step on each batch; ``on_gpu`` within ``pretended_gpu``."""
    own = module_to_gpu(copy.deepcopy(network)) if on_gpu else copy.deepcopy(network)
    harness = Harness(own, shape, plan, kind=SameNoise, chunks=chunks, secret=SECRET)
    if on_gpu:
        module_to_gpu(harness.module)
    optimizer = torch.optim.SGD(harness.module.network.parameters(), lr=rate)
    taken = Taken([], {})
    mechanism = harness.mechanism
    for number, batch in enumerate(batches):
        placed = tuple(to_gpu(part, counted=False) for part in batch) if on_gpu else batch

        def phase(name: str, act: Callable[[], object]) -> None:
            counts.clear()
            act()
            taken.phases[name] = Counts(*astuple(counts))

        phase("begin", lambda number=number: mechanism.begin_step(number))
        phase("passes", lambda number=number, placed=placed: harness.accumulate(placed, number))
        phase("release", lambda number=number: mechanism.privatize_(number))
        phase("optimizer", optimizer.step)
        phase("projection", mechanism.project_)
        held = [p.detach() for p in harness.module.network.parameters()]
        plain = [p.inner if isinstance(p, OnGpu) else p for p in held]
        taken.weights.append(torch.cat([p.flatten().double() for p in plain]))
    mechanism.close()
    return taken
