"""What the certificate and the projection cost per step, beside a forward and backward pass."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ..bounds.certifier import Certifier
from ..bounds.losses import CrossEntropy
from ..bounds.tracked import TrackedNorms
from ..layers import make_private
from ..models import ConvNet, WideResNet

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convnet-1.6m": (lambda: ConvNet((1, 28, 28), 10, (32, 64), hidden=(512,)), (1, 28, 28)),
    "wrn-16-4": (lambda: WideResNet((3, 32, 32), 10, 16, 4), (3, 32, 32)),
}


@dataclass(frozen=True)
class CertificateCost:
    """Medians in seconds; ``percent_of_step`` relates the amortised cost to the pass at the same batch size."""

    model: str
    parameters: int
    batch_size: int
    forward_backward: float
    exact_certificate: float
    cheap_certificate: float
    projection: float
    refreshes_per_step: float
    amortised: float
    percent_of_step: float


def _median(function: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(name: str, batch_sizes: Sequence[int], repeats: int = 3, steps: int = 20) -> list[CertificateCost]:
    """Costs for one model on this machine.

    The amortised cost is measured, not computed: ``steps`` steps whose updates have the size of a training
    step (1 % of each weight's norm), each followed by projection and certificate, exact where the
    cheap bound has drifted by more than its slack.
    """
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = make_private(build())
    norms = TrackedNorms()
    certifier = Certifier(model, shape, 1.0, CrossEntropy(), norms=norms)
    exact = _median(lambda: Certifier(model, shape, 1.0, CrossEntropy()).certify(), 1)
    certifier.certify()
    certifier.certify()
    tracker = norms.tracker
    assert tracker is not None
    cheap = _median(lambda: certifier.certify(), max(repeats, 5))
    limits: list[float | None] = [1.0] * len(tracker.entries)
    tracker.clip(limits)
    before = tracker.refreshes
    projections, certificates = [], []
    for _ in range(steps):
        _perturb(model)
        projections.append(_median(lambda: tracker.clip(limits), 1))
        certificates.append(_median(certifier.certify, 1))
    amortised = statistics.mean(projections) + statistics.mean(certificates)
    rows = []
    for batch in batch_sizes:
        seconds = _forward_backward(model, shape, batch, repeats)
        rows.append(
            CertificateCost(
                name, sum(p.numel() for p in model.parameters()), batch, seconds, exact, cheap,
                statistics.mean(projections), (tracker.refreshes - before) / steps, amortised,
                100 * amortised / seconds,
            )
        )  # fmt: skip
    return rows


@torch.no_grad()
def _perturb(model: nn.Module) -> None:
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        size = torch.linalg.vector_norm(noise).clamp_min(1e-12)
        parameter.add_(noise * (0.01 * torch.linalg.vector_norm(parameter) / size))


def _forward_backward(model: nn.Module, shape: tuple[int, ...], batch: int, repeats: int) -> float:
    x = torch.randn(batch, *shape)
    y = torch.randint(0, 10, (batch,))
    loss = CrossEntropy()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss.per_example(model(x), y).sum().backward()

    step()
    return _median(step, repeats)


def as_rows(costs: Sequence[CertificateCost]) -> list[dict[str, Any]]:
    return [asdict(cost) for cost in costs]
