"""Measures the cost of certificate and projection per step, beside a forward and backward pass."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..bounds.certifier import Certifier
from ..bounds.losses import CrossEntropy
from ..layers import make_private
from ..models import ConvNet, WideResNet
from ..norms.follow import SLACK, Follower

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convnet-1.6m": (lambda: ConvNet((1, 28, 28), 10, (32, 64), hidden=(512,)), (1, 28, 28)),
    "wrn-16-4": (lambda: WideResNet((3, 32, 32), 10, 16, 4), (3, 32, 32)),
}

UPDATE_SIZE = 0.002
"""Size of an update relative to each weight, in Frobenius norm."""

LONG_PASS = 10.0
"""Seconds beyond which a pass is measured once."""

MICRO_BATCH = 256
"""Larger batches are passed in parts of this size, since a wide network takes 10 MB per example."""

_MAX_NORM = 1.0
_WARM_UP_BATCH = 8


@dataclass(frozen=True)
class CertificateCost:
    """Costs in seconds: medians of ``passes`` passes and of the cheap certificates, and means over the steps otherwise.

    ``amortised`` is projection and certificate together, with the exact norms that fall due; ``percent_of_step``
    relates it to the pass at the same batch size.
    """

    model: str
    parameters: int
    update_size: float
    slack: float
    threads: int
    batch_size: int
    passes: int
    forward_backward: float
    exact_certificate: float
    cheap_certificate: float
    projection: float
    refreshes_per_step: float
    amortised: float
    percent_of_step: float


def clock() -> Callable[[], float]:
    """Returns processor time with one thread, which other processes on the machine disturb least, and wall time
    otherwise, since threads that wait for work use processor time too.
    """
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def _seconds(function: Callable[[], Any]) -> float:
    now = clock()
    start = now()
    function()
    return now() - start


def measure(
    name: str,
    batch_sizes: Sequence[int],
    repeats: int = 3,
    steps: int = 200,
    update_size: float = UPDATE_SIZE,
    slack: float = SLACK,
) -> list[CertificateCost]:
    """Measures the costs for one model on this machine, with torch's present number of threads.

    The amortised cost is measured, not computed: ``steps`` random updates, each followed by projection and certificate,
    whose norms are exact where the cheap bounds have drifted by more than their slack. Layers that did not reach an
    exact norm within these steps are charged with one. Passes are taken in between, so that a load on the machine
    affects both; passes of more than LONG_PASS seconds are taken once.

    Args:
        name: a key of ``MODELS``.
        batch_sizes: the batch sizes of the passes.
        repeats: the number of passes at each size.
        steps: the number of updates.
        update_size: the size of an update relative to its weight.
        slack: how far a cheap bound may drift above the last exact norm.

    Returns:
        One cost for each batch size.
    """
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = make_private(build())
    norms = Follower(slack)
    certifier = Certifier(model, shape, 1.0, CrossEntropy(), norms=norms)
    exact = _seconds(certifier.certify)
    clip = Clipping(model, norms)
    clip()
    update = RandomUpdates(model, update_size)
    passes = Passes(model, shape, batch_sizes, repeats)
    renewals = Renewals(norms)
    projections, certificates = [], []
    for step in range(steps):
        if step * repeats // steps != (step - 1) * repeats // steps:
            passes.take()
        update()
        projections.append(_seconds(clip))
        certificates.append(_seconds(certifier.certify))
        renewals.count()
    due = _seconds(renewals.evaluate_others)
    projection = statistics.fmean(projections) + due / steps
    amortised = projection + statistics.fmean(certificates)
    return [
        CertificateCost(
            name, sum(p.numel() for p in model.parameters()), update_size, slack, torch.get_num_threads(), batch,
            len(taken), statistics.median(taken), exact, statistics.median(certificates), projection,
            renewals.evaluated / steps, amortised,
            100 * amortised / statistics.median(taken),
        )
        for batch, taken in passes.seconds.items()
    ]  # fmt: skip


class Clipping:
    """Clips every weight that a follower was asked about."""

    def __init__(self, model: nn.Module, follower: Follower, max_norm: float = _MAX_NORM) -> None:
        self._names = [name for name, _ in model.named_parameters() if follower.operators_of(name)]
        self._follower, self._max_norm = follower, max_norm

    def __call__(self) -> None:
        self._follower.measure()
        self._follower.clip_(dict.fromkeys(self._names, self._max_norm))


class Renewals:
    """Counts how often the norms of the followed weights were evaluated."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._before = follower.state()["anchors"]
        self._unevaluated = set(self._before)
        self.evaluated = 0

    def count(self) -> None:
        now = self._follower.state()["anchors"]
        for name, anchor in now.items():
            if anchor["reference"] is not self._before[name]["reference"]:
                self.evaluated += 1
                self._unevaluated.discard(name)
        self._before = now

    def evaluate_others(self) -> None:
        """Evaluates each norm that did not fall due."""
        self.evaluated += len(self._unevaluated)
        for name in self._unevaluated:
            for operator in self._follower.operators_of(name):
                operator.norm(self._follower.weight_of(name))


class RandomUpdates:
    """Adds noise of a given relative size to every parameter.

    The noise is a window at a random place of a larger sample, which takes less time than drawing it.
    """

    def __init__(self, model: nn.Module, size: float) -> None:
        self._parameters = list(model.parameters())
        self._samples = [torch.randn(4 * p.numel() + 64) for p in self._parameters]
        self._size = size

    @torch.no_grad()
    def __call__(self) -> None:
        for parameter, sample in zip(self._parameters, self._samples, strict=True):
            start = int(torch.randint(sample.numel() - parameter.numel(), (1,)))
            noise = sample[start : start + parameter.numel()].view(parameter.shape)
            scale = torch.linalg.vector_norm(parameter) / torch.linalg.vector_norm(noise).clamp_min(1e-12)
            parameter.addcmul_(noise, scale, value=self._size)


class Passes:
    """Times forward and backward passes at several batch sizes, long ones once."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...], batch_sizes: Sequence[int], repeats: int) -> None:
        self._model, self._shape = model, shape
        self.seconds: dict[int, list[float]] = {batch: [] for batch in batch_sizes}
        self._run(*self._batch(_WARM_UP_BATCH))

    def _batch(self, size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, *self._shape), torch.randint(0, 10, (size,))

    def _run(self, x: Tensor, y: Tensor) -> None:
        self._model.zero_grad(set_to_none=True)
        for inputs, labels in zip(x.split(MICRO_BATCH), y.split(MICRO_BATCH), strict=True):
            CrossEntropy().per_example(self._model(inputs), labels).sum().backward()

    def take(self) -> None:
        for size, taken in self.seconds.items():
            if not taken or taken[0] <= LONG_PASS:
                x, y = self._batch(size)
                taken.append(_seconds(partial(self._run, x, y)))


def as_rows(costs: Sequence[CertificateCost]) -> list[dict[str, Any]]:
    return [asdict(cost) for cost in costs]


def printed(costs: Sequence[CertificateCost], steps: int) -> str:
    """Returns the table for the terminal."""
    from ..report.tables import render_table

    headers = (
        "model", "parameters", "batch", "passes", "forward+backward s", "exact cert. s", "cheap cert. s",
        "projection s/step", "exact norms/step", "amortised s/step", "% of step",
    )  # fmt: skip
    rows = [
        (
            cost.model, cost.parameters, cost.batch_size, cost.passes, cost.forward_backward, cost.exact_certificate,
            cost.cheap_certificate, cost.projection, cost.refreshes_per_step, cost.amortised, cost.percent_of_step,
        )
        for cost in costs
    ]  # fmt: skip
    first = costs[0]
    timing = "processor time" if first.threads == 1 else "wall time"
    size = f"updates of {100 * first.update_size:g} %, slack {first.slack:g}, {steps} steps"
    return (
        render_table(headers, rows, title=f"Cost of the certificate per step: {size}")
        + f"\n{timing}, threads: {first.threads}; passes beyond {LONG_PASS:g} s are measured once, "
        f"batches beyond {MICRO_BATCH} passed in parts\n"
    )
