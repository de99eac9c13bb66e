"""Names the networks that contenders train, and makes random rows for them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..kernels.rows import floored_by_torch
from ..layers import GroupNorm, MaxMin
from ..models import MLP, ConvNet, WideResNet

IMAGE_ROWS = 16_384
TABLE_ROWS = 40_000


@dataclass(frozen=True)
class Network:
    """A network's constructor, the shape of one example, and the numbers of outputs and training rows."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    outputs: int
    rows: int


def _convnet(hidden: int) -> Network:
    shape = (1, 28, 28)
    return Network(lambda: ConvNet(shape, 10, (32, 64), hidden=(hidden,)), shape, 10, IMAGE_ROWS)


def _wide(depth: int, width: int) -> Network:
    shape = (3, 32, 32)
    groups = 16 if width >= 4 else 8  # the groups of the floored normalisation divide 16 times the width, and 16 itself
    return Network(lambda: WideResNet(shape, 10, depth, width, norm_groups=groups), shape, 10, IMAGE_ROWS // 2)


def _mlp(width: int, layers: int) -> Network:
    return Network(lambda: MLP((width,), 10, (width,) * (layers - 1)), (width,), 10, IMAGE_ROWS)


NETWORKS: dict[str, Network] = {
    "convnet-1.6m": _convnet(512),
    # 104 columns, the number that Adult has after encoding its categories
    "mlp-table": Network(lambda: MLP((104,), 2, (128, 64)), (104,), 2, TABLE_ROWS),
    "wrn-16-4": _wide(16, 4),
    # precomputed scattering coefficients of 28 x 28 images, J = 2, L = 8
    "scattering-head": Network(lambda: MLP((3969,), 10, bias=False, zero_init=True), (3969,), 10, IMAGE_ROWS),
}
FAMILIES: tuple[tuple[str, str, Callable[..., Network]], ...] = (
    (r"convnet-h(\d+)", "convnet-hH: the ConvNet with a dense layer of H", _convnet),
    (r"mlp-(\d+)x(\d+)", "mlp-WxL: L dense layers, W features and hidden units", _mlp),
    (r"wrn-(\d+)-(\d+)", "wrn-D-K: WideResNet-D-K", _wide),
)


def network_named(name: str) -> Network:
    """Returns one of NETWORKS, or a member of one of FAMILIES."""
    if name in NETWORKS:
        return NETWORKS[name]
    for pattern, _, make in FAMILIES:
        match = re.fullmatch(pattern, name)
        if match and all(int(number) > 0 for number in match.groups()):
            return make(*map(int, match.groups()))
    families = "; ".join(text for _, text, _ in FAMILIES)
    raise ValueError(f"--model {name} is not one of {', '.join(NETWORKS)}, nor of the families {families}")


class TorchMaxMin(nn.Module):
    """MaxMin by torch's operations, as a training loop without this library would have it."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.unflatten(x, 1, (-1, 2)).unbind(2)
        return torch.stack((torch.maximum(first, second), torch.minimum(first, second)), 2).flatten(1, 2)


class TorchGroupNorm(nn.Module):
    """A normalisation with a floored divisor by torch's operations."""

    def __init__(self, like: GroupNorm) -> None:
        super().__init__()
        self._groups, self.alpha = like._groups, like.alpha

    def forward(self, x: Tensor) -> Tensor:
        return floored_by_torch(x.reshape(len(x), self._groups(x), -1), self.alpha).reshape(x.shape)


def in_plain_torch(model: nn.Module) -> nn.Module:
    """Returns the network without the loops of this library."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, MaxMin):
                setattr(module, name, TorchMaxMin())
            elif isinstance(child, GroupNorm):
                setattr(module, name, TorchGroupNorm(child))
    return model


def random_rows(shape: tuple[int, ...], rows: int, classes: int) -> tuple[Tensor, Tensor]:
    """Returns random rows, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(rows, *shape, generator=generator)
    return x, torch.randint(classes, (rows,), generator=generator)
