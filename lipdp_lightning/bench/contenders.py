"""Defines what is measured side by side: plain torch, Lightning, this library, and per-example gradients in three ways.

A contender takes a Job and ``between``, which it calls before every step; it trains until its process is ended.
``package.module:function`` names a user's own contender.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..privacy.sampling import poisson_sample
from .networks import Network, in_plain_torch, network_named, random_rows

NOISE_MULTIPLIER = 1.0
CLIP_NORM = 1.0
UPDATE_SIZE = 0.002
"""Norm of an update relative to that of the weights, so that certificate and projection have work, as in training."""

MEMORY_STEPS = 5
SECRET = bytes(16)
"""Secret of the Poisson samples of contenders that draw none of their own, and of all while memory is measured."""

Between = Callable[[], None]
Contender = Callable[["Job", Between], None]


@dataclass(frozen=True)
class Job:
    """One contender on one network at one batch size, in one process.

    With ``memory``, its memory is measured and not its time: every contender then trains on the Poisson samples of
    SECRET, since a sample is larger than expected in every other step, and the memory of a step grows with it. Without
    ``memory``, contenders without privacy and those of opacus and torch.func have batches of one size. With ``parts``,
    the parts of its step are timed from the start, since a private step is refused once its functions are replaced.
    """

    contender: str
    model: str
    batch_size: int
    device: str = "cpu"
    threads: int = 1
    memory_limit: int | None = None
    memory: bool = False
    parts: bool = False

    @property
    def network(self) -> Network:
        return network_named(self.model)

    @property
    def rows(self) -> int:
        return max(self.network.rows, 2 * self.batch_size)

    def samples(self, device: torch.device | str = "cpu") -> Iterator[Tensor]:
        """Yields the Poisson samples of SECRET without end; while memory is measured, a few of them are repeated."""
        for step in itertools.count():
            index = step % (MEMORY_STEPS + 1) if self.memory else step
            yield poisson_sample(SECRET, index, self.rows, self.batch_size / self.rows).to(device)

    def batches(self, device: torch.device | str = "cpu") -> Iterator[Tensor]:
        """Yields indices of rows without end: of one size and in a random order, or the Poisson samples."""
        if self.memory:
            yield from self.samples(device)
        while True:
            order = torch.randperm(self.rows, device=device)
            yield from order[: self.rows // self.batch_size * self.batch_size].split(self.batch_size)


Step = Callable[[Tensor, Tensor], None]


def _trains(make: Callable[[Job, nn.Module], Step], poisson: bool = False) -> Contender:
    """Makes a loop over batches, indexed from tensors on the device."""

    def run(job: Job, between: Between) -> None:
        network, device = job.network, torch.device(job.device)
        x, y = (t.to(device) for t in random_rows(network.shape, job.rows, network.outputs))
        step = make(job, in_plain_torch(network.build()).to(device))
        for rows in job.samples(device) if poisson else job.batches(device):
            between()
            step(x.index_select(0, rows), y.index_select(0, rows))

    return run


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Returns plain descent whose rate is set after the first step, which does not move; updates have UPDATE_SIZE."""
    given = list(parameters)
    optimizer = torch.optim.SGD(given, lr=0.0)

    @torch.no_grad()
    def set_rate(*_: Any) -> None:
        moved = [p for p in given if p.grad is not None]
        weights, gradients = (torch.stack([t.norm() for t in ts]).norm() for ts in (moved, [p.grad for p in moved]))
        for group in optimizer.param_groups:
            group["lr"] = UPDATE_SIZE * float(weights / gradients.clamp_min(1e-12))
        handle.remove()

    handle = optimizer.register_step_post_hook(set_rate)
    return optimizer


def _plain_step(job: Job, model: nn.Module) -> Step:
    optimizer = sgd(model.parameters())

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


torch_loop = _trains(_plain_step)
"""The loop without privacy, which every ratio refers to."""


@_trains
def opacus_hooks(job: Job, model: nn.Module) -> Step:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    watched: Any = GradSampleModule(model)
    optimizer = DPOptimizer(
        sgd(watched.parameters()), noise_multiplier=NOISE_MULTIPLIER, max_grad_norm=CLIP_NORM,
        expected_batch_size=job.batch_size,
    )  # fmt: skip

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(watched(x), y).backward()
        optimizer.step()

    return step


@_trains
def opacus_ghost(job: Job, model: nn.Module) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    watched: Any = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP_NORM, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(
        sgd(watched.parameters()), noise_multiplier=NOISE_MULTIPLIER, max_grad_norm=CLIP_NORM,
        expected_batch_size=job.batch_size,
    )  # fmt: skip
    loss = DPLossFastGradientClipping(watched, optimizer, nn.CrossEntropyLoss())

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(watched(x), y).backward()
        optimizer.step()

    return step


@_trains
def functorch(job: Job, model: nn.Module) -> Step:
    """Computes the gradients of all examples of the batch at once by torch.func, clips, sums and adds noise."""
    optimizer = sgd(model.parameters())
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, values, (x.unsqueeze(0),))
        return F.cross_entropy(logits, y.unsqueeze(0))

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))

    def step(x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            gradients = each({name: p.detach() for name, p in parameters.items()}, x, y)
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
            factors = (CLIP_NORM / (norms + 1e-6)).clamp(max=1.0)
            for name, parameter in parameters.items():
                total = torch.tensordot(factors, gradients[name], dims=1)
                total += torch.randn_like(total) * (NOISE_MULTIPLIER * CLIP_NORM)
                parameter.grad = total / job.batch_size
        optimizer.step()

    return step


@_trains
def in_jax(job: Job, model: nn.Module) -> Step:
    from .jax_step import jax_step

    return jax_step(job, model)


CONTENDERS: dict[str, str] = {
    "torch": "a loop in plain torch, without privacy",
    "torch_poisson": "the same, over Poisson samples as they are drawn",
    "lightning": "Lightning, without privacy",
    "worst_case": "this library, scaling worst_case (Lip-DP-SGD)",
    "layerwise": "this library, scaling layerwise",
    "joint": "this library, scaling joint, the default",
    "exact": "this library, scaling exact",
    "radius": "this library, scaling radius",
    "loss_clip": "this library, the loss gradient clipped and no scaling",
    "opacus": "opacus, gradients per example from hooks",
    "ghost": "opacus, ghost clipping",
    "functorch": "torch.func, gradients per example",
    "jax": "jax, gradients per example by vmap, the step compiled by XLA",
}
REFERENCE = "torch"
DEFAULT = "joint"
OURS = ("worst_case", "layerwise", "joint", "exact", "radius", "loss_clip")
_PLAIN: dict[str, Contender] = {
    "torch": torch_loop, "torch_poisson": _trains(_plain_step, poisson=True), "opacus": opacus_hooks,
    "ghost": opacus_ghost, "functorch": functorch, "jax": in_jax,
}  # fmt: skip


def problem_of(name: str) -> str | None:
    """Returns why there is no such contender; the user's own ones are looked for in their process."""
    if name in CONTENDERS or ":" in name:
        return None
    return f"contender {name} is not one of {', '.join(CONTENDERS)}, nor package.module:function"


def own_contender(name: str) -> Contender:
    module, _, function = name.partition(":")
    found: Contender = getattr(importlib.import_module(module), function)
    return found


def contender_named(name: str) -> Contender:
    if name in _PLAIN:
        return _PLAIN[name]
    if ":" in name:
        return own_contender(name)
    from . import trained

    return trained.lightning_loop if name == "lightning" else trained.private
