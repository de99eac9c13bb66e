"""Small networks of the kinds that paper 002 tests: ResNet-20 and a transformer, thin enough for one thread."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Adds two convolutions with group normalisation to their input, as a block of ResNet-20 does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width), nn.ReLU()]
        self.inner = nn.Sequential(*layers, nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.inner(x))


def resnet_20() -> nn.Module:
    """Returns the 20 layers of ResNet-20 at four channels, for images of 8 by 8."""
    blocks = [Block(4) for _ in range(9)]
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


class Transformer(nn.Module):
    """Classifies eight tokens of a vocabulary of 20 by two heads of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)
        self.queries, self.keys, self.values = (nn.Linear(8, 8) for _ in range(3))
        self.norm, self.after = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = (f(x).unflatten(2, (2, 4)).transpose(1, 2) for f in (self.queries, self.keys, self.values))
        x = self.norm(x + (torch.softmax(q @ k.mT / 2, -1) @ v).transpose(1, 2).flatten(2))
        outputs: Tensor = self.head((x + self.after(x)).mean(1))
        return outputs


def tokens(count: int, generator: torch.Generator) -> Tensor:
    """Draws sequences of tokens."""
    return torch.randint(20, (count, 8), generator=generator)


def images(count: int, generator: torch.Generator) -> Tensor:
    """Draws images of 8 by 8."""
    return torch.randn(count, 3, 8, 8, generator=generator)
