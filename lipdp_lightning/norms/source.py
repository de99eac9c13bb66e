"""Provides rules with the norms of weights."""

from __future__ import annotations

import torch
from torch import Tensor

from .operators import Operator


class NormSource:
    """Gives certified norms of weights; this one computes each exactly every time it is asked.

    A weight is named by the parameter or buffer that holds it, such as ``"blocks.0.conv.weight"``. The order of
    requests means nothing: a source that remembers anything keeps it by that name, and by the operator.
    """

    def begin(self, digest: bytes = b"") -> None:
        """Starts a new walk over the graph; weights may have changed since the last one.

        Args:
            digest: names all bits of the model's weights, if the caller knows it; equal digests mean equal weights.
        """

    def operator_norm(self, name: str, weight: Tensor, operator: Operator) -> float:
        """Returns an upper bound on the norm of the operator with this weight."""
        return operator.norm(weight.detach(), name)

    def vector_norm(self, vector: Tensor) -> float:
        """Returns an upper bound on the l2 norm of a vector; NaN propagates."""
        return float(torch.linalg.vector_norm(vector.detach().double())) * (1 + 2.0**-40)
