"""Norms of weights as bfloat16 autocast uses them."""

from __future__ import annotations

from torch import Tensor

from ..norms.dense import frobenius_norm
from ..norms.operators import NormSource, Operator

ROUNDING = 2.0**-8
"""Largest relative error of rounding one number to bfloat16."""


class RoundedNorms(NormSource):
    """Norms of the weights rounded to bfloat16, from a source that knows those of the weights themselves.

    Rounding changes every entry by at most 2^-8 of it, hence the weight by D with ||D||_F <= 2^-8 ||W||_F,
    and its operator's norm by at most ``deviation_factor(weight)`` times that. It is no relative change of the norm: a
    weight whose norm is small by cancellation loses the cancellation.
    """

    def __init__(self, source: NormSource) -> None:
        self._source = source

    def begin(self, digest: bytes = b"") -> None:
        self._source.begin(digest)

    def operator_norm(self, name: str, weight: Tensor, operator: Operator) -> float:
        norm = self._source.operator_norm(name, weight, operator)
        return norm + operator.deviation_factor(weight) * ROUNDING * frobenius_norm(weight)

    def vector_norm(self, vector: Tensor) -> float:
        return self._source.vector_norm(vector) * (1 + ROUNDING)
