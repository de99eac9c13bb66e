"""Operators that weights define, as values, and where rules get their norms from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import SupportsBytes

import torch
from torch import Tensor


class Operator(ABC):
    """Maps weights to linear operators, which are applied to an example; equal objects are the same map.

    Guarantee of every subclass: a change D of the weight moves the norm of the operator by at most
    ``deviation_factor(weight)`` times the spectral norm of ``D.flatten(1)``. (An operator that keeps only the weaker
    promise of k ||D||_F returns k times the root of the number of rows here.)
    """

    groups: int = 1
    """The weight consists of this many blocks of rows, each of which acts on inputs of its own."""

    @abstractmethod
    def norm(self, weight: Tensor, name: str = "weight") -> float:
        """Returns a certified upper bound on the operator's norm; a weight that is not finite is refused by name."""

    @abstractmethod
    def deviation_factor(self, weight: Tensor) -> float:
        """Returns the factor of the guarantee; it depends on the shape of the weight alone."""

    def is_cheap(self, weight: Tensor) -> bool:
        """Returns whether the norm costs no more than a bound on the change of a weight, which is then not followed."""
        return weight.numel() == 0


class NormSource:
    """Gives certified norms of weights; this one computes each exactly every time it is asked.

    A weight is named by the parameter or buffer that holds it, such as ``"blocks.0.conv.weight"``. The order of
    requests means nothing: a source that remembers anything keeps it by that name, and by the operator.

    Attributes:
        rounding: The largest relative error of one rounding in the precision that the network computes in.
        covered: The number of roundings of a value for which the margin of an operation pays.
    """

    rounding, covered = 2.0**-24, 7

    def begin(self, state: SupportsBytes = b"") -> None:
        """Starts a new walk over the graph; weights may have changed since the last one.

        Args:
            state: Names all bits of the model's weights, if the caller knows it; equal states mean equal weights.
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


def frobenius_norm(weight: Tensor) -> float:
    """Returns an upper bound on the Frobenius norm, computed in float64 without underflow; NaN propagates."""
    if weight.numel() == 0:
        return 0.0
    values = weight.detach() if weight.device.type != "mps" else weight.detach().cpu()
    margin = 1.0 + (weight.numel() + 16) * 2.0**-52
    if values.dtype != torch.float64:  # the squares of its entries neither overflow nor vanish in float64
        return float(torch.linalg.vector_norm(values, dtype=torch.float64)) * margin
    least, most = torch.aminmax(values)  # takes a tenth of the time of a maximum norm
    largest = float(torch.maximum(-least, most))
    if largest == 0.0:
        return 0.0
    return float(torch.linalg.vector_norm(values / largest)) * largest * margin
