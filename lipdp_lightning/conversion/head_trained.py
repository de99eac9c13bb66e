"""A network whose last modules are trained on the frozen features of all before them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from ..layers import FrozenFeatures


class HeadTrained(nn.Module):
    """Brings the output of a frozen part into a ball and passes it through modules that are trained.

    Args:
        frozen: The part that is not trained; it is frozen and put into evaluation mode.
        trained: The modules that follow, in their order, each with its path in the original model.
        bound: The radius of the ball, in which shorter features stay as they are.
    """

    def __init__(self, frozen: nn.Module, trained: Sequence[tuple[str, nn.Module]], bound: float) -> None:
        super().__init__()
        self.features = FrozenFeatures(frozen.requires_grad_(False).eval(), bound, "clip")
        named = OrderedDict((path.replace(".", "_"), module) for path, module in trained)
        self.head = nn.Sequential(named)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits
