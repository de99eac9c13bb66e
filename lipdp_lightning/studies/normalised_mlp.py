"""The two-layer perceptron of 000 table 5, with group normalisation of its hidden layer or without."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from lipdp_lightning.layers import GroupNorm


class NormalisedMLP(nn.Module):
    """A hidden layer, group normalisation with a floored divisor if there are groups, ReLU, and logits.

    Args:
        input_shape: the shape of one example.
        outputs: the number of logits.
        hidden: the width of the hidden layer.
        groups: the number of groups; 0 leaves the normalisation out.
        floor: the least divisor.
    """

    def __init__(
        self, input_shape: Sequence[int], outputs: int, hidden: int = 32, groups: int = 0, floor: float = 0.5
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(math.prod(input_shape), hidden, bias=False)]
        if groups:
            layers.append(GroupNorm(groups, hidden, floor))
        self.layers = nn.Sequential(*layers, nn.ReLU(), nn.Linear(hidden, outputs, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        outputs: Tensor = self.layers(x)
        return outputs
