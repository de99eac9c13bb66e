"""Ordinary models, small enough to be attacked, that need every kind of substitute."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block as it is usually written, with writes in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.act1, self.act2 = nn.ReLU(inplace=True), nn.ReLU(inplace=True)
        nn.init.zeros_(self.bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
        y += x
        return self.act2(y)


class SmallResNet(nn.Module):
    """A stem, a stage of two blocks, dropout of channels and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.RReLU(inplace=True))
        self.stage = nn.Sequential(Block(8), Block(8))
        self.drop, self.pool = nn.Dropout2d(0.2), nn.AdaptiveAvgPool2d(2)
        self.flat, self.fc = nn.Flatten(), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.flat(self.pool(self.drop(self.stage(self.stem(x))))))


class SmallMixer(nn.Module):
    """Tokens, layer normalisation over the last dimension, and a gain that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Conv2d(3, 8, 2, stride=2), nn.LayerNorm(8)
        self.gain = nn.Parameter(torch.full((8,), 0.5))
        self.mix, self.final, self.fc = nn.Linear(16, 16), nn.GroupNorm(2, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        y = self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2) * self.gain
        return self.fc(self.final((x + y).transpose(1, 2)).mean(2))


class Gated(nn.Module):
    """A squeeze-and-excitation gate, which is a product of activations, before a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate, self.pool = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.AdaptiveAvgPool2d(1)
        self.flat, self.fc = nn.Flatten(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        return self.fc(self.flat(self.pool(x)))


MODELS: dict[str, type[nn.Module]] = {"resnet": SmallResNet, "mixer": SmallMixer}
SHAPE = (3, 8, 8)


def lived_in(model: nn.Module) -> nn.Module:
    """Moves statistics and scales away from where they start, as training would."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2.0, generator=generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()
