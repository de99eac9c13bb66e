"""Wide residual networks with a floored group normalisation in place of batch normalisation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ..layers import GroupNorm, Residual


def _block(before: int, after: int, stride: int, groups: int, alpha: float) -> nn.Module:
    """Pre-activation block; the halves of body and shortcut keep a non-expansive body non-expansive."""
    body = nn.Sequential(
        GroupNorm(groups, before, alpha),
        nn.ReLU(),
        nn.Conv2d(before, after, 3, stride=stride, padding=1),
        GroupNorm(groups, after, alpha),
        nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1),
    )
    shortcut = None if before == after and stride == 1 else nn.Conv2d(before, after, 1, stride=stride)
    return Residual(body, shortcut, body_scale=0.5, shortcut_scale=0.5)


class WideResNet(nn.Module):
    """WideResNet-depth-width: three stages of (depth - 4) / 6 blocks, of 16, 32 and 64 times ``width`` channels.

    Args:
        input_shape: (channels, height, width) of one example.
        outputs: number of logits.
        depth: 16, 28, 40, ...
        width: the factor k.
        norm_groups: groups of the floored normalisation.
        norm_alpha: its floor; each normalisation has Lipschitz constant 1/alpha.
    """

    def __init__(
        self,
        input_shape: Sequence[int] = (3, 32, 32),
        outputs: int = 10,
        depth: int = 16,
        width: int = 4,
        norm_groups: int = 16,
        norm_alpha: float = 1.0,
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth={depth} is not 6 n + 4. HINT: 16, 22, 28 or 40.")
        blocks = (depth - 4) // 6
        layers: list[nn.Module] = [nn.Conv2d(input_shape[0], 16, 3, padding=1)]
        channels = 16
        for stage, after in enumerate((16 * width, 32 * width, 64 * width)):
            for i in range(blocks):
                layers.append(_block(channels, after, 2 if stage and i == 0 else 1, norm_groups, norm_alpha))
                channels = after
        layers += [GroupNorm(norm_groups, channels, norm_alpha), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
