"""Provides the subject of an audit: one private step of a module under a plan, run by the parts that train.

Noise is a function of the secret and of the state that a step starts from, not of its batch. Repeating a step with
another batch therefore repeats the noise, and the difference of the two releases is the exact shift of the sum.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..accounting.events import MOST_STEPS
from ..bounds.losses import Loss
from ..clipping import make_clipper
from ..layers.cotangents import attach_cotangent_clips
from ..mechanism.noise import Place
from ..mechanism.step import Mechanism
from ..norms.follow import Follower
from ..privacy.keys import derive_key
from ..privacy.plan import PrivacyPlan
from ..training.module import ClippedLoss, PrivateModule
from ..training.set_up import make_certifier, matching_modules
from ..training.strategy import PrivateStrategy
from .starts import target_source, to_boundary

Batch = tuple[Tensor, Tensor, Tensor]
Example = tuple[Tensor, Tensor]
ANY_NUMBER = MOST_STEPS
NUMBER = 10**6  # the id of an example that joins a batch, the same in each, so that its own randomness is the same
SECRET = bytes(range(16))  # an audit of a public algorithm on made-up rows hides nothing


class StepStrategy(PrivateStrategy):
    """Answers what a module asks its Strategy, without a Trainer."""

    def step_key(self, purpose: str, *indices: int) -> int:
        key = derive_key(SECRET, purpose, *indices)
        return int.from_bytes(key[:8], "big", signed=True)


class Subject:
    """Runs the step of ``module`` under ``plan``; ``release`` returns its output in units of the sum of gradients.

    Args:
        module: the module under audit.
        plan: the plan under audit.
        input_shape: the shape of one example.
        kind: the class of the mechanism; tests pass broken ones.
        place: the rank and the number of processes that this process plays.
        chunks: the number of micro-batches of a step.
        secret: the secret that noise and samples are drawn from.
        switched: whether to audit the step after the switch of a plan that switches to another scaling.
    """

    def __init__(
        self,
        module: PrivateModule,
        plan: PrivacyPlan,
        input_shape: tuple[int, ...],
        *,
        kind: type[Mechanism] = Mechanism,
        place: Place | None = None,
        chunks: int = 1,
        secret: bytes = SECRET,
        switched: bool = False,
    ) -> None:
        self.module, self.plan, self.input_shape, self.chunks = module, plan, tuple(input_shape), chunks
        with torch.no_grad():
            found = copy.deepcopy(module.network).eval()(torch.zeros(1, *self.input_shape))
        self.output_shape = tuple(found.shape[1:])
        module.clip_loss(plan.loss_clip)
        surroundings: Any = (
            SimpleNamespace(precision="32-true", strategy=None),
            SimpleNamespace(input_shape=self.input_shape),
        )
        certifier = make_certifier(surroundings[0], module, plan, surroundings[1], Follower())
        repeated = repeated_step(plan, switched)
        strategy = StepStrategy(repeated)
        strategy.clipper = make_clipper(module.network, repeated)
        self._hooks = attach_cotangent_clips(module.network, matching_modules(module.network, plan.cotangent_clip))
        self.mechanism = strategy.mechanism = kind(module.network, certifier, repeated, secret, place=place, grid=False)
        self.mechanism.project_()
        self.mechanism.refresh_certificate()
        self._state = self.mechanism.state()
        named = dict(module.network.named_parameters())
        self.parameters = [named[name] for group in self.mechanism.certificate.groups for name in group.parameters]
        module.trainer = SimpleNamespace(  # type: ignore[assignment]
            strategy=strategy, accumulate_grad_batches=chunks, world_size=1, global_step=0
        )

    def close(self) -> None:
        self.mechanism.close()
        for hook in self._hooks:
            hook.remove()

    # ---- what the plan claims

    @property
    def joint(self) -> bool:
        """True if the claim bounds all groups together, and not each by itself."""
        return bool(self.mechanism.scaling.joint)

    @property
    def groups(self) -> list[tuple[str, int]]:
        return [(group.name, group.numel) for group in self.mechanism.certificate.groups]

    def claimed_deviations(self) -> Tensor:
        """Returns sigma_k of every coordinate, as the mechanism states it."""
        by_name = self.mechanism.deviations()
        return torch.cat([torch.full((n,), by_name[name], dtype=torch.float64) for name, n in self.groups])

    def whitened(self, flat: Tensor) -> Tensor:
        """Returns a vector in units of the claimed noise; a nonzero coordinate without noise counts as infinite."""
        deviations = self.claimed_deviations()
        scaled = flat / deviations.clamp_min(1e-300)
        return torch.where(deviations > 0, scaled, torch.where(flat == 0, 0.0, math.inf).to(flat.dtype))

    def by_group(self, flat: Tensor) -> dict[str, Tensor]:
        parts = torch.split(flat, [n for _, n in self.groups])
        return {name: part for (name, _), part in zip(self.groups, parts, strict=True)}

    # ---- one step

    def release(
        self, batch: Batch, step: int = 0, canary: Tensor | None = None, reduce: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Returns the noised sum of a step times the public divisor; ``canary`` is added to the sum of gradients."""
        mechanism = self.mechanism
        mechanism.load_state(self._state)  # a tracked radius changes with every release
        mechanism.begin_step(step)
        for parameter in self.parameters:
            parameter.grad = None
        if len(batch[0]) or canary is None:
            self._accumulate(batch, step)
        if canary is not None:
            self._add(canary)
        mechanism.privatize_(step, reduce)
        return self._gradient() * self._divisor()

    def shift(self, batch: Batch, example: Example, step: int = 0, base: Tensor | None = None) -> Tensor:
        """Returns how far the example moves the sum; both releases have the noise of one step, which cancels."""
        without = self.release(batch, step) if base is None else base
        return self.release(with_example(batch, example), step) - without

    def _accumulate(self, batch: Batch, step: int) -> None:
        for chunk in range(self.chunks):
            part = tuple(t[chunk :: self.chunks] for t in batch)
            if chunk:  # nothing may have changed since the chunk before
                self.mechanism.begin_step(step)
            loss: Any = self.module.training_step(part, chunk)  # type: ignore[arg-type]
            (loss / self.chunks).backward()

    def _add(self, canary: Tensor) -> None:
        sizes = [p.numel() for p in self.parameters]
        for parameter, part in zip(self.parameters, torch.split(canary, sizes), strict=True):
            addition = part.reshape(parameter.shape).to(parameter.dtype)
            parameter.grad = addition if parameter.grad is None else parameter.grad + addition

    def _gradient(self) -> Tensor:
        rows = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        return torch.cat([row.detach().double().flatten() for row in rows])

    def _divisor(self) -> float:
        # batch_max divides by the drawn size, as in its source; this undoes that, so that its other fault shows alone
        return self.mechanism.divisor() if self.plan.scaling == "batch_max" else self.plan.expected_batch_size

    # ---- made-up examples

    @property
    def plain_loss(self) -> Loss:
        loss = self.module.loss
        return loss.loss if isinstance(loss, ClippedLoss) else loss

    def examples(self, count: int, seed: int = 0, largest: float = 1.0) -> Batch:
        """Returns random directions with norms between zero and ``largest`` times the input bound, and
        random targets.
        """
        generator = torch.Generator().manual_seed(seed)
        x = to_boundary(torch.randn((count, *self.input_shape), generator=generator), self.module.input_bound)
        x = x * largest * torch.rand((count, *(1,) * len(self.input_shape)), generator=generator)
        y = target_source(self.plain_loss, self.output_shape)(count, generator)
        return x, y if not y.is_floating_point() else y.float(), torch.arange(count)

    def nothing(self) -> Batch:
        x, y, ids = self.examples(1)
        return x[:0], y[:0], ids[:0]


def repeated_step(plan: PrivacyPlan, switched: bool) -> PrivacyPlan:
    """Returns a plan of any number of the given plan's steps, before its switch or after; trials are steps of their
    own.
    """
    influence = plan.influence_at(int(plan.first_switched_step) if switched else 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dataclasses.replace(plan, steps=ANY_NUMBER, influence=influence)


def with_example(batch: Batch, example: Example) -> Batch:
    """Returns the neighbouring batch, with the example in its middle so that others change their places."""
    half = len(batch[0]) // 2
    added = (example[0].unsqueeze(0), example[1].unsqueeze(0), torch.tensor([NUMBER]))
    x, y, ids = (torch.cat([t[:half], a.to(t.dtype), t[half:]]) for t, a in zip(batch, added, strict=True))
    return x, y, ids
