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
        self._released: list[tuple[Tensor | None, int]] = [(None, 0)] * len(self._parameters)

    def check_none(self) -> None:
        """Raise ValueError if a backward pass would add to a gradient that is neither released nor zero."""
        for parameter, (released, version) in zip(self._parameters, self._released, strict=True):
            gradient = parameter.grad
            if gradient is None or (gradient is released and gradient._version == version):
                continue
            if bool(gradient.count_nonzero()):
                raise ValueError(
                    "a gradient was there before the step's own backward pass, and its bound does not cover two. "
                    "HINT: no backward() in a hook; torch.autograd.grad leaves gradients alone."
                )

    def remember(self) -> None:
        """Keep in mind which gradients are released ones."""
        gradients = [parameter.grad for parameter in self._parameters]
        self._released = [(g, 0 if g is None else g._version) for g in gradients]

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
