"""The sum of gradients over the micro-batches of a step."""

from __future__ import annotations

from torch import Tensor, nn


class PartialSums:
    """Takes gradients without noise out of sight until the step is complete, and puts their sum there.

    It is kept in float64, so that the sum is rounded once, however many micro-batches make a step: that is what the
    margin of a sensitivity allows for.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters())
        self._sums: dict[int, Tensor] = {}

    def take(self) -> None:
        """Add a micro-batch to the sums; no gradient is left."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                before = self._sums.get(index)
                self._sums[index] = parameter.grad.double() if before is None else before.add_(parameter.grad)
                parameter.grad = None

    def put_back(self) -> None:
        """The sum over all micro-batches, the last of which is still in ``grad``."""
        if not self._sums:
            return
        self.take()
        for index, total in self._sums.items():
            self._parameters[index].grad = total.to(self._parameters[index].dtype)
        self._sums = {}
