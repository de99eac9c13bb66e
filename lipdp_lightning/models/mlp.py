"""Defines linear models and multi-layer perceptrons."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import Tensor, nn

from .blocks import activation


class MLP(nn.Module):
    """A multi-layer perceptron on the flattened input.

    Args:
        input_shape: the shape of one example; in a configuration, null takes the one that the data declares.
        outputs: number of logits; in a configuration, null takes the number that the data declares.
        hidden: widths of the hidden layers; empty for a linear model.
        activation_name: relu, tanh or maxmin.
        bias: whether the layers have a bias; a bias enters every later forward bound.
        zero_init: whether the last layer starts at zero, so that the first steps add no noise to earlier layers.
    """

    def __init__(
        self,
        input_shape: Sequence[int] | None,
        outputs: int | None,
        hidden: Sequence[int] = (),
        activation_name: str = "maxmin",
        bias: bool = True,
        zero_init: bool = False,
    ) -> None:
        super().__init__()
        if input_shape is None or outputs is None:
            raise ValueError(
                "MLP needs input_shape and outputs. HINT: in a configuration of `lipdp fit`, null takes what the data "
                "module declares."
            )
        widths = [math.prod(input_shape), *hidden, outputs]
        layers: list[nn.Module] = [nn.Flatten()]
        for i, (before, after) in enumerate(itertools.pairwise(widths)):
            if i:
                layers.append(activation(activation_name))
            layers.append(nn.Linear(before, after, bias=bias))
        last = layers[-1]
        if zero_init:
            assert isinstance(last, nn.Linear)
            nn.init.zeros_(last.weight)
            if last.bias is not None:
                nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Linear(MLP):
    """One layer from the flattened input to the logits, whose bound does not depend on its weights."""

    def __init__(self, input_shape: Sequence[int], outputs: int, bias: bool = True, zero_init: bool = True) -> None:
        super().__init__(input_shape, outputs, bias=bias, zero_init=zero_init)
