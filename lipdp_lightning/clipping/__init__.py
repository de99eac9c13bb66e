"""Clipping of examples' gradients in place of bounds. Opacus is imported where a plan asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from ..privacy.plan import PrivacyPlan


class Clipper(Protocol):
    """Gives a loss whose gradient is the sum of clipped gradients, one for each row."""

    def total(self, rows: Tensor, loss_of: Callable[[Tensor], Tensor], step: int) -> Tensor:
        """The summed loss of the rows; ``loss_of`` gives the loss of each."""


def make_clipper(network: nn.Module, plan: PrivacyPlan) -> Clipper | None:
    """What bounds each example's gradient where the plan clips; None where the certificate bounds it."""
    if not plan.clips_examples:
        return None
    from .clipper import OpacusClipper

    return OpacusClipper(network, plan)
