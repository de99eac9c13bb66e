"""Schedules learning rates that rise, then fall over the steps of a plan; both are public, so they cost no privacy."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class PlannedSchedule(LRScheduler):
    """Raises the rate linearly over ``warmup`` of the steps, then lets it fall to ``final`` times the rate at the last
    step.

    Both are shares: of the steps, and of the optimizer's learning rate. The schedule moves once a step. ``lipdp fit``
    takes the number of steps from the plan, so that it need not be computed from epochs.

    Args:
        optimizer: the optimizer; the configuration fills it in.
        warmup: the share of the steps that the rise takes, in [0, 1).
        final: the share of the learning rate that is left at the end, in [0, 1].
        total_steps: the plan's steps; needed only in Python.
    """

    interval = "step"

    def __init__(
        self, optimizer: Optimizer, warmup: float = 0.05, final: float = 0.0, total_steps: int | None = None
    ) -> None:
        problems = []
        if not 0 <= warmup < 1:
            problems.append(f"warmup={warmup} is not a share of the steps in [0, 1). HINT: 0.05")
        if not 0 <= final <= 1:
            problems.append(f"final={final} is not a share of the learning rate in [0, 1]. HINT: 0.0")
        if total_steps is not None and not (isinstance(total_steps, int) and total_steps >= 1):
            problems.append(f"total_steps={total_steps!r} is not a number of steps. HINT: plan.steps")
        if problems:
            raise ValueError("; ".join(problems))
        self.warmup, self.final, self.total_steps = float(warmup), float(final), total_steps
        super().__init__(optimizer)

    def plan_steps(self, steps: int) -> None:
        """Takes the number of steps from the plan, unless it was given."""
        if self.total_steps is None:
            self.total_steps = steps
            self._set_rates()

    def factor(self, step: int) -> float:
        """Returns the factor on the learning rate at a step, counted from 0."""
        total = self.total_steps
        if total is None:
            if step > 0:
                raise ValueError(
                    f"{type(self).__name__} does not know how many steps there are. HINT: set total_steps=plan.steps."
                )
            return 1.0
        rising = math.ceil(self.warmup * total)
        if step < rising:
            return (step + 1) / (rising + 1)
        share = min(1.0, (step - rising) / max(1, total - 1 - rising))
        return self.final + (1 - self.final) * self.fall(share)

    def fall(self, share: float) -> float:
        """Returns the fall from 1 to 0, as ``share`` goes from 0 to 1."""
        raise NotImplementedError

    def get_lr(self) -> list[float | Any]:
        factor = self.factor(self.last_epoch)
        return [rate * factor for rate in self.base_lrs]

    def _set_rates(self) -> None:
        rates = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._last_lr = rates


class WarmupCosine(PlannedSchedule):
    """Falls like half a cosine."""

    def fall(self, share: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * share))


class WarmupLinear(PlannedSchedule):
    """Falls linearly."""

    def fall(self, share: float) -> float:
        return 1 - share
