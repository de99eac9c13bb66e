"""What an audit takes apart: one private step of a module under a plan, run by the parts that train.

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

from ..baselines.clipping import make_clipper
from ..bounds.losses import Loss
from ..layers.cotangents import attach_cotangent_clips
from ..mechanism.noise import Place
from ..mechanism.step import Mechanism
from ..norms.follow import Follower
from ..privacy.plan import PrivacyPlan
from ..privacy.plan_checks import MOST_STEPS
from ..privacy.randomness import derive_key
from ..training.module import ClippedLoss, PrivateModule
from ..training.set_up import make_certifier, matching_modules
from ..training.strategy import PrivateStrategy
from .starts import target_source, to_boundary

Batch = tuple[Tensor, Tensor, Tensor]
Example = tuple[Tensor, Tensor]
ANY_NUMBER = MOST_STEPS
NUMBER = 10**6  # the id of an example that joins a batch: its own randomness must be the same in each
SECRET = bytes(range(16))  # an audit of a public algorithm on made-up rows hides nothing


class StepStrategy(PrivateStrategy):
    """What a module asks its Strategy for, without a Trainer around."""

    def step_key(self, purpose: str, *indices: int) -> int:
        key = derive_key(SECRET, purpose, *indices)
        return int.from_bytes(key[:8], "big", signed=True)


class Subject:
    """The step of ``module`` under ``plan``; ``release`` is what leaves it, in the units of the sum of gradients.

    Args:
        kind: the mechanism; a broken one in tests.
        place: rank and number of processes that this one plays.
        chunks: micro-batches of a step.
        switched: of a plan that switches to another scaling, the step after the switch.
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
        surroundings: Any = SimpleNamespace(precision="32-true"), SimpleNamespace(input_shape=self.input_shape)
        certifier = make_certifier(surroundings[0], module, plan, surroundings[1], Follower())
        repeated = repeated_step(plan, switched)
        strategy = StepStrategy(repeated)
        strategy.clipper = make_clipper(module.network, repeated)
        self._hooks = attach_cotangent_clips(module.network, matching_modules(module.network, plan.cotangent_clip))
        self.mechanism = strategy.mechanism = kind(module.network, certifier, repeated, secret, place=place, grid=False)
        self.mechanism.project_()
        self.mechanism.refresh_certificate()
        self._state = self.mechanism.state()
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
        """Whether the claim is one for all groups together, and none for each."""
        return bool(self.mechanism.scaling.joint)

    @property
    def groups(self) -> list[tuple[str, int]]:
        return [(group.name, group.numel) for group in self.mechanism.certificate.groups]

    def claimed_deviations(self) -> Tensor:
        """sigma_k of every coordinate, as the mechanism states it."""
        by_name = self.mechanism.deviations()
        return torch.cat([torch.full((n,), by_name[name], dtype=torch.float64) for name, n in self.groups])

    def whitened(self, flat: Tensor) -> Tensor:
        """In units of the claimed noise; a coordinate without noise counts as infinite where it is not zero."""
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
        """The noised sum of a step, times the public divisor; ``canary`` is added to the sum of gradients."""
        mechanism = self.mechanism
        mechanism.load_state(self._state)  # a tracked radius moves with every release
        mechanism.begin_step(step)
        self.module.zero_grad(set_to_none=True)
        if len(batch[0]) or canary is None:
            self._accumulate(batch, step)
        if canary is not None:
            self._add(canary)
        mechanism.privatize_(step, reduce)
        return self._gradient() * self._divisor()

    def shift(self, batch: Batch, example: Example, step: int = 0, base: Tensor | None = None) -> Tensor:
        """How far the example moves the sum: the noise is that of the same step, and cancels."""
        without = self.release(batch, step) if base is None else base
        return self.release(with_example(batch, example), step) - without

    def _accumulate(self, batch: Batch, step: int) -> None:
        for chunk in range(self.chunks):
            part = tuple(t[chunk :: self.chunks] for t in batch)
            if chunk:  # nothing may have changed since the one before
                self.mechanism.begin_step(step)
            loss: Any = self.module.training_step(part, chunk)  # type: ignore[arg-type]
            (loss / self.chunks).backward()

    def _parameters(self) -> list[torch.nn.Parameter]:
        named = dict(self.module.network.named_parameters())
        return [named[name] for group in self.mechanism.certificate.groups for name in group.parameters]

    def _add(self, canary: Tensor) -> None:
        parameters = self._parameters()
        for parameter, part in zip(parameters, torch.split(canary, [p.numel() for p in parameters]), strict=True):
            addition = part.reshape(parameter.shape).to(parameter.dtype)
            parameter.grad = addition if parameter.grad is None else parameter.grad + addition

    def _gradient(self) -> Tensor:
        rows = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters()]
        return torch.cat([row.detach().double().flatten() for row in rows])

    def _divisor(self) -> float:
        # batch_max divides by what was drawn, as printed in its source; its own fault is to be seen apart from that
        return self.mechanism.divisor() if self.plan.scaling == "batch_max" else self.plan.expected_batch_size

    # ---- made-up examples

    @property
    def plain_loss(self) -> Loss:
        loss = self.module.loss
        return loss.loss if isinstance(loss, ClippedLoss) else loss

    def examples(self, count: int, seed: int = 0, largest: float = 1.0) -> Batch:
        """Random directions with norms between zero and ``largest`` times the input bound, random targets."""
        generator = torch.Generator().manual_seed(seed)
        x = to_boundary(torch.randn((count, *self.input_shape), generator=generator), self.module.input_bound)
        x = x * largest * torch.rand((count, *(1,) * len(self.input_shape)), generator=generator)
        y = target_source(self.plain_loss, self.output_shape)(count, generator)
        return x, y if not y.is_floating_point() else y.float(), torch.arange(count)

    def nothing(self) -> Batch:
        x, y, ids = self.examples(1)
        return x[:0], y[:0], ids[:0]


def repeated_step(plan: PrivacyPlan, switched: bool) -> PrivacyPlan:
    """A plan of any number of the given plan's steps, before its switch or after: trials are steps of their own."""
    first = plan.first_switched_step if switched else 0
    clipping = plan.clipping_at(first) if plan.clips_examples else plan.clipping
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dataclasses.replace(
            plan, steps=ANY_NUMBER, switch_at=None, switch_to=None, scaling=plan.scaling_at(first), clipping=clipping
        )


def with_example(batch: Batch, example: Example) -> Batch:
    """The neighbouring batch, the example in its middle: the places of others change."""
    half = len(batch[0]) // 2
    added = (example[0].unsqueeze(0), example[1].unsqueeze(0), torch.tensor([NUMBER]))
    x, y, ids = (torch.cat([t[:half], a.to(t.dtype), t[half:]]) for t, a in zip(batch, added, strict=True))
    return x, y, ids
