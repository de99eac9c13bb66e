"""Operators that weights define, as values: what a rule asks a norm source about."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import SupportsBytes

import torch
from torch import Tensor

from .conv import conv_norm
from .dense import close_norm, dense_norm, frobenius_norm
from .geometry import Padding, Sizes, kappa
from .strips import TALL_STRIP

_CHEAP_SIDE, _CHEAP_ENTRIES = 16, 2**14


class Operator(ABC):
    """A map from weights to linear operators, which are applied to an example; equal operators are the same map.

    Guarantee of every subclass: a change D of the weight moves the norm of the operator by at most
    ``deviation_factor(weight)`` times the spectral norm of ``D.flatten(1)``. (An operator that keeps only the weaker
    promise of k ||D||_F returns k times the root of the number of rows here.)
    """

    groups: int = 1
    """The weight consists of this many blocks of rows, each of which acts on inputs of its own."""

    @abstractmethod
    def norm(self, weight: Tensor, name: str = "weight") -> float:
        """Returns a certified upper bound on the operator's norm; ValueError naming the weight if it is not finite."""

    def close_norm(self, weight: Tensor, name: str = "weight") -> float:
        """Returns an upper bound that may be a little higher, for which less work is enough."""
        return self.norm(weight, name)

    def deviation_factor(self, weight: Tensor) -> float:
        """Returns the factor of the guarantee; it depends on the shape of the weight alone."""
        return 1.0

    def is_cheap(self, weight: Tensor) -> bool:
        """Tells whether the norm costs no more than a bound on the change of the weight, so that it is not followed."""
        return weight.numel() == 0

    def is_quick(self, weight: Tensor) -> bool:
        """Tells whether the norm costs no more than a bound on the change by tall strips, which is then not tried."""
        return self.is_cheap(weight)


@dataclass(frozen=True)
class Dense(Operator):
    """x -> W x, at any number of positions."""

    def norm(self, weight: Tensor, name: str = "weight") -> float:
        return dense_norm(weight, name=name)

    def close_norm(self, weight: Tensor, name: str = "weight") -> float:
        return close_norm(weight, name=name)

    def is_cheap(self, weight: Tensor) -> bool:
        return weight.is_cpu and min(weight.shape) <= _CHEAP_SIDE and weight.numel() <= _CHEAP_ENTRIES

    def is_quick(self, weight: Tensor) -> bool:
        return weight.is_cpu and min(weight.shape) <= TALL_STRIP


@dataclass(frozen=True)
class Convolution(Operator):
    """A convolution of one or two axes; arguments as in torch.nn, and the size of the images it is applied to."""

    stride: Sizes = 1
    padding: Padding = 0
    dilation: Sizes = 1
    groups: int = 1
    padding_mode: str = "zeros"
    input_size: Sizes | None = None

    def norm(self, weight: Tensor, name: str = "weight") -> float:
        return conv_norm(
            weight, stride=self.stride, padding=self.padding, dilation=self.dilation, groups=self.groups,
            padding_mode=self.padding_mode, input_size=self.input_size, name=name,
        )  # fmt: skip

    def deviation_factor(self, weight: Tensor) -> float:
        """Returns kappa: each input pixel is read by at most kappa^2 pairs of an output and a tap.

        The change D acts on the patches of the image, whose norm is at most kappa times that of the image. Groups make
        D.flatten(1) a stack of their matrices, whose norm is not below that of any of them.
        """
        return kappa(
            tuple(weight.shape[2:]), self.stride, self.dilation, self.padding, self.padding_mode, self.input_size
        )


class NormSource:
    """Gives certified norms of weights; this one computes each exactly every time it is asked.

    A weight is named by the parameter or buffer that holds it, such as ``"blocks.0.conv.weight"``. The order of
    requests means nothing: a source that remembers anything keeps it by that name, and by the operator.
    """

    def begin(self, state: SupportsBytes = b"") -> None:
        """Starts a new walk over the graph; weights may have changed since the last one.

        Args:
            state: names all bits of the model's weights, if the caller knows it; equal states mean equal weights.
        """

    def operator_norm(self, name: str, weight: Tensor, operator: Operator) -> float:
        """Returns an upper bound on the norm of the operator with this weight."""
        return operator.norm(weight.detach(), name)

    def frobenius_norm(self, name: str, weight: Tensor) -> float:
        """Returns an upper bound on the Frobenius norm of a weight whose operator was asked about."""
        return frobenius_norm(weight)

    def vector_norm(self, vector: Tensor) -> float:
        """Returns an upper bound on the l2 norm of a vector; NaN propagates."""
        return float(torch.linalg.vector_norm(vector.detach().double())) * (1 + 2.0**-40)
