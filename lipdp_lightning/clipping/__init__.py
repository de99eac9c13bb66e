"""Provides what a plan's per-example clipping needs in training; opacus is imported only if a plan asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from ..privacy.plan import PrivacyPlan


class Clipper(Protocol):
    """Makes a loss whose gradient is the sum of clipped gradients, one for each row."""

    def total(self, rows: Tensor, loss_of: Callable[[Tensor], Tensor], step: int) -> Tensor:
        """Returns the summed loss of the rows; ``loss_of`` gives the loss of each."""


def make_clipper(network: nn.Module, plan: PrivacyPlan, views: int = 1) -> Clipper | None:
    """Returns what bounds each example's gradient if the plan clips; None if the certificate bounds it.

    Args:
        network: the network that is trained.
        plan: the settled plan of the run.
        views: the number of consecutive rows that are views of one example.
    """
    if not plan.clips_examples:
        return None
    from .clipper import OpacusClipper

    return OpacusClipper(network, plan, views)
