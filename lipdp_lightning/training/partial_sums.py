"""The sum of gradients between the micro-batches of a step."""

from __future__ import annotations

from torch import Tensor, nn


class PartialSums:
    """Takes gradients without noise out of sight until the step is complete, and puts them back."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters())
        self._kept: list[Tensor | None] = []

    def hide(self) -> None:
        self._kept = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def put_back(self) -> None:
        for parameter, kept in zip(self._parameters, self._kept, strict=False):
            parameter.grad = kept
        self._kept = []
