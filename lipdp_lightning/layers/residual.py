"""A residual block as a container; the certificate walks through it."""

from __future__ import annotations

from torch import Tensor, nn


class Residual(nn.Module):
    """Computes shortcut_scale * shortcut(x) + body_scale * body(x).

    With scales of 1/2, a 1-Lipschitz shortcut and a 1-Lipschitz body give a 1-Lipschitz block.
    """

    def __init__(
        self,
        body: nn.Module,
        shortcut: nn.Module | None = None,
        body_scale: float = 1.0,
        shortcut_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut if shortcut is not None else nn.Identity()
        self.body_scale, self.shortcut_scale = float(body_scale), float(shortcut_scale)

    def forward(self, x: Tensor) -> Tensor:
        straight = self.shortcut(x)
        if self.shortcut_scale != 1.0:
            straight = straight * self.shortcut_scale
        bent = self.body(x)
        if self.body_scale != 1.0:
            bent = bent * self.body_scale
        return straight + bent
