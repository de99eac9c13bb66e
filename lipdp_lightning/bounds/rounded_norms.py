"""Norms of weights as bfloat16 autocast uses them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .values import NormSource

ROUNDING = 2.0**-8
"""Largest relative error of rounding one number to bfloat16."""


class RoundedNorms(NormSource):
    """Norms of the weights rounded to bfloat16, from a source that knows those of the weights themselves.

    Rounding changes every entry by at most 2^-8 of it, hence the weight by D with ||D||_F <= 2^-8 ||W||_F,
    and its operator's norm by at most ``deviation_factor ||D||_F``. It is no relative change of the norm: a
    weight whose norm is small by cancellation loses the cancellation.
    """

    def __init__(self, source: NormSource) -> None:
        self._source = source

    def begin(self) -> None:
        self._source.begin()

    def operator_norm(
        self,
        weight: Tensor,
        exact: Callable[[], float],
        deviation_factor: float,
        groups: int = 1,
        spectral: bool = False,
        anew: Callable[[Tensor], float] | None = None,
    ) -> float:
        size = float(torch.linalg.vector_norm(weight.detach(), dtype=torch.float64)) * (1 + weight.numel() * 2.0**-52)
        norm = self._source.operator_norm(weight, exact, deviation_factor, groups, spectral, anew)
        return norm + deviation_factor * ROUNDING * size

    def vector_norm(self, vector: Tensor) -> float:
        return self._source.vector_norm(vector) * (1 + ROUNDING)
