"""Cross-entropy with a linear tail: a convex loss whose gradient saturates, as Huber's does."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lipdp_lightning.bounds.losses import CrossEntropy


@dataclass(frozen=True)
class SaturatingCrossEntropy(CrossEntropy):
    """Cross-entropy up to error probability ``slope``, and beyond it its tangent: slope times cross-entropy's constant.

    With the margin m = logsumexp of the other logits - the true one, cross-entropy is softplus(m), whose derivative is
    the error probability 1 - p_y. Here the derivative is min(1 - p_y, slope). The gradient of m is (softmax over the
    other classes) - e_y, of norm at most sqrt(2), attained when one other class has all the mass. m is convex, and an
    increasing convex function of it stays convex: the loss has minimisers of its own. An example far on the wrong side
    pulls with the same force however far it is.

    A small slope makes the bound small where most examples' gradients are: less noise for the same signal.
    """

    slope: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.slope < 1:
            raise ValueError(f"slope={self.slope} is outside (0, 1). HINT: 0.15; 'cross_entropy' is the loss at 1.")
        if self.label_smoothing:
            raise ValueError("label_smoothing has no margin to saturate. HINT: leave it at 0, or use CrossEntropy.")

    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        if target.is_floating_point():
            raise ValueError("saturating cross-entropy was given floating-point targets. HINT: integer class labels.")
        index = target.unsqueeze(1)
        scaled = logits / self.temperature
        others = scaled.scatter(1, index, -math.inf)
        margin = (torch.logsumexp(others, 1, keepdim=True) - scaled.gather(1, index)).squeeze(1)
        knee = math.log(self.slope / (1 - self.slope))
        # each side sees its own arguments only, so neither overflows
        losses = F.softplus(margin.clamp_max(knee)) + self.slope * (margin - knee).clamp_min(0)
        if self.class_weights is not None:
            losses = losses * torch.tensor(self.class_weights, dtype=losses.dtype, device=losses.device)[target]
        return losses.flatten(1).sum(1) if losses.dim() > 1 else losses

    def lipschitz(self, shape: tuple[int, ...]) -> float:
        if shape and shape[0] < 2:
            raise ValueError("saturating cross-entropy needs two classes or more. HINT: 'binary_cross_entropy'.")
        return self.slope * super().lipschitz(shape)
