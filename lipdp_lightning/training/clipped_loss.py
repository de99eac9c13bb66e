"""loss_clip: a loss whose per-example gradient in the logits is clipped to a public radius."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..bounds.losses import Loss
from ..layers.cotangents import CotangentClip


@dataclass(frozen=True)
class ClippedLoss(Loss):
    """The same loss values; backward, each example's cotangent at the logits has norm at most ``radius``.

    The radius applies to the gradient of the example's whole loss: nothing may divide the loss in
    between. It brings back part of per-sample clipping's bias, and with one trained layer on
    unit-norm inputs it is per-sample clipping.
    """

    loss: Loss
    radius: float

    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.loss.per_example(CotangentClip(self.radius)(logits), target)

    def lipschitz(self, shape: tuple[int, ...]) -> float:
        return min(self.loss.lipschitz(shape), self.radius)
