"""Audits one training run by the real Trainer and Strategy, with many canaries, each inserted by a fair coin.

Steinke, Nasr and Jagielski (2023): how well the coins can be guessed from the releases of one run bounds its epsilon,
whatever the dependence between canaries. Canary j is a gradient in coordinate j alone, as long as the claim allows, so
that canaries do not disturb each other; the run's own sampler draws the steps that it takes part in.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor

from ..bound_text import lower_text, upper_text
from ..budget.calibrate import privacy_bound
from ..mechanism.noise import Sum
from ..mechanism.scaling import StepNumbers
from ..mechanism.step import Mechanism
from ..privacy.keys import derive_key
from ..privacy.plan import PrivacyPlan
from ..training.module import PrivateModule
from ..training.strategy import PrivateStrategy
from .brief_training import train_briefly
from .canaries import score_plot
from .confidence import best_guesses, one_run_epsilon, one_run_p_value
from .findings import Finding, verdict
from .subject import SECRET

MOST_CANARIES = 2000
MOST_STEPS = 200


@dataclass(frozen=True)
class OneRun:
    """The coins (+1 in the data, -1 not) and the scores of the canaries of one run."""

    coins: np.ndarray
    scores: np.ndarray
    steps: int


class CanaryStrategy(PrivateStrategy):
    """The run's Strategy, with additional rows that add a gradient instead of an example."""

    def __init__(self, plan: PrivacyPlan, coins: Tensor, **options: Any) -> None:
        super().__init__(plan, **options)
        self.coins = coins
        self.owners = (coins > 0).nonzero().flatten()
        self.scores = torch.zeros(len(coins), dtype=torch.float64)
        self.steps_seen = 0
        self._present: list[Tensor] = []
        self._examples = torch.zeros(0, dtype=torch.float64)

    def _draw(self, rows: int) -> Callable[[int, int], Tensor]:
        inner = super()._draw(rows + len(self.owners))

        def draw(step: int, chunk: int) -> Tensor:
            drawn = inner(step, chunk)
            self._present.append(self.owners[drawn[drawn >= rows] - rows])
            return drawn[drawn < rows]

        return draw

    def setup(self, trainer: lightning.Trainer) -> None:
        super().setup(trainer)
        mechanism = self.mechanism
        assert mechanism is not None
        sums_of, privatize = mechanism._sums, mechanism.privatize_

        def sums_with_canaries(numbers: StepNumbers) -> list[Sum]:
            sums = sums_of(numbers)
            # the worst-case observer knows what the examples add, and subtracts it from the release
            self._examples = torch.cat([one.total() for one in sums])
            present = torch.cat(self._present) if self._present else torch.empty(0, dtype=torch.int64)
            self._present = []
            canaries = torch.zeros_like(self._examples)
            canaries[present] = self._sizes(mechanism)[present]
            parts = canaries.split_with_sizes([one.values.numel() for one in sums])
            return [_with_addition(one, part) for one, part in zip(sums, parts, strict=True)]

        def privatize_and_look(*arguments: Any, **options: Any) -> None:
            privatize(*arguments, **options)
            self._observe(mechanism)

        mechanism._sums = sums_with_canaries  # type: ignore[method-assign]
        mechanism.privatize_ = privatize_and_look  # type: ignore[method-assign]

    def _sizes(self, mechanism: Mechanism) -> Tensor:
        """Returns what the claim allows in a single coordinate: Delta_k, or tau_k where the claim is joint."""
        return _by_coordinate(mechanism, mechanism.sensitivities())[: len(self.coins)]

    def _observe(self, mechanism: Mechanism) -> None:
        rate, count = mechanism.plan.sample_rate, len(self.coins)
        noise = _by_coordinate(mechanism, mechanism.deviations())[:count].clamp_min(1e-300)
        released = flat_gradients(mechanism) * mechanism.divisor()
        z = (released - self._examples[: len(released)])[:count] / noise
        mu = self._sizes(mechanism) / noise
        self.scores += torch.log1p(rate * torch.expm1((mu * z - mu * mu / 2).clamp_max(700.0)))
        self.steps_seen += 1


def _with_addition(one: Sum, addition: Tensor) -> Sum:
    """Returns a sum with something added to it, beside what it holds already."""
    apart = addition / one.share if one.apart is None else one.apart.reshape(-1) + addition / one.share
    return dataclasses.replace(one, apart=apart)


def _by_coordinate(mechanism: Mechanism, by_name: dict[str, float]) -> Tensor:
    groups = mechanism.certificate.groups
    return torch.cat([torch.full((g.numel,), by_name[g.name], dtype=torch.float64) for g in groups])


def _parameters(mechanism: Mechanism) -> list[torch.nn.Parameter]:
    named = dict(mechanism.model.named_parameters())
    return [named[name] for group in mechanism.certificate.groups for name in group.parameters]


def flat_gradients(mechanism: Mechanism) -> Tensor:
    rows = [torch.zeros_like(p) if p.grad is None else p.grad for p in _parameters(mechanism)]
    return torch.cat([row.detach().double().flatten() for row in rows])


def canary_run(
    module: PrivateModule, plan: PrivacyPlan, data: Any, *, seed: int = 0, canaries: int | None = None,
    most_steps: int = MOST_STEPS, strategy: type[CanaryStrategy] = CanaryStrategy,
) -> OneRun:  # fmt: skip
    """Trains a copy of the module with canaries, for at most ``most_steps`` of the plan's steps.

    Statistics released before the steps are left out, since made-up data have none.
    """
    own, plan = copy.deepcopy(module), dataclasses.replace(plan, preliminary=())
    numbers = sum(p.numel() for p in own.network.parameters() if p.requires_grad)
    count = min(canaries or MOST_CANARIES, numbers)
    generator = torch.Generator().manual_seed(seed)
    coins = torch.randint(2, (count,), generator=generator) * 2 - 1
    steps = min(plan.steps, most_steps)
    kind = strategy(plan, coins, fixed_secret=derive_key(SECRET, "one run", seed)[:16])
    train_briefly(own, data, kind, steps)
    return OneRun(coins.numpy(), kind.scores.numpy(), kind.steps_seen)


def one_run_finding(plan: PrivacyPlan, run: OneRun, alpha: float) -> Finding:
    """Guesses that the canaries with the highest scores are in and as many with the lowest are out, and none of the
    others.

    The audit uses a delta of its own, since the bound's term 2 m delta must stay below alpha; the plan's epsilon at
    that delta comes from PLD.
    """
    canaries = len(run.coins)
    delta = min(plan.delta, alpha / (50 * canaries))
    claimed = privacy_bound(plan.step_noise_multiplier, delta, plan.sample_rate, run.steps, "pld").epsilon
    rate, sigma = plan.sample_rate, plan.noise_multiplier
    mu = math.sqrt(run.steps * math.log1p(rate * rate * math.expm1(min(1 / sigma**2, 50.0))))
    guesses = best_guesses(mu, canaries, delta, alpha)
    order = np.argsort(run.scores)
    correct = int((run.coins[order[-(guesses // 2) :]] > 0).sum() + (run.coins[order[: guesses // 2]] < 0).sum())
    lower = one_run_epsilon(canaries, guesses, correct, delta, alpha)
    p_value = one_run_p_value(canaries, guesses, correct, claimed, delta)
    text = (
        f"One run of {run.steps} steps with {canaries} canaries: {correct} of {guesses} guesses are right, which shows "
        f"epsilon >= {lower_text(lower)} at delta {upper_text(delta, 2)}, where {upper_text(claimed)} is claimed "
        "for these steps."
    )
    values = {
        "canaries": canaries, "guesses": guesses, "correct": correct, "delta": delta, "steps": run.steps,
        "confidence": 1 - alpha,
    }  # fmt: skip
    return Finding(
        "one run", "Can the canaries of one run be guessed better than claimed?", verdict(lower > claimed), text,
        p_value=p_value, alpha=alpha, epsilon_lower=lower, epsilon_claimed=claimed, values=values,
        plots=(score_plot((run.scores[run.coins < 0].tolist(), run.scores[run.coins > 0].tolist()), alpha),),
    )  # fmt: skip
