"""Modules that random graphs are made of: functions, branches, shared values, tuples, reused and tied layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]


class Call(nn.Module):
    """A function of the value alone, traced through."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Functional(nn.Module):
    """F.linear or F.conv with parameters of its own, and arithmetic with a parameter and a buffer."""

    def __init__(self, kind: str, weight_shape: Shape, bias: bool, options: dict[str, object]) -> None:
        super().__init__()
        self.kind, self.options = kind, options
        self.weight = nn.Parameter(torch.randn(weight_shape))
        self.bias = nn.Parameter(torch.randn(weight_shape[0])) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        function = {"linear": F.linear, "conv1d": F.conv1d, "conv2d": F.conv2d}[self.kind]
        return function(x, self.weight, self.bias, **self.options)


class Arithmetic(nn.Module):
    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind = kind
        broadcast = (shape[0], *(1,) * (len(shape) - 1))
        self.shift = nn.Parameter(0.3 * torch.randn(broadcast))
        self.register_buffer("mask", torch.randn(broadcast).clamp(-1, 1))
        if kind not in ("shift", "gain"):
            del self.shift

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "shift":
            return x + self.shift
        if self.kind == "gain":
            return x * self.shift
        if self.kind == "mask":
            return (x * self.mask - 0.2) / 1.5
        return 0.5 * x + self.mask - x.flip(1) * 0.25


class Shared(nn.Module):
    """A sub-expression that several operations read."""

    def __init__(self, body: nn.Module, kind: str) -> None:
        super().__init__()
        self.body, self.kind = body, kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.kind == "sum":
            return torch.tanh(y) + y - 0.5 * torch.relu(y)
        if self.kind == "cat":
            return torch.cat([y, F.softsign(y), y], 1)
        return y + y


class Branches(nn.Module):
    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.left(x), self.right(x), 0.5 * x), dim=1)


class Parts(nn.Module):
    """chunk, split and unbind, with members read once, twice and by a negative index."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "chunk":
            a, b = x.chunk(2, 1)
            return torch.cat([b, a.relu() + 0.5 * b], 1)
        if self.kind == "split":
            parts = torch.split(x, [1, x.shape[1] - 1], dim=1)
            return torch.cat([parts[-1], parts[0], torch.tanh(parts[-2])], 1)
        parts = x.unflatten(1, (-1, 2)).unbind(2)
        return parts[0] - parts[-1] + parts[-2].abs()


class Reused(nn.Module):
    """One layer called several times."""

    def __init__(self, layer: nn.Module, times: int) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times - 1):
            x = F.leaky_relu(self.layer(x), 0.5)
        return self.layer(x)


class Tied(nn.Module):
    """Two layers with one weight and two biases, and a function that reads the weight once more."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, features), nn.Linear(features, features)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x))) + 0.5 * F.linear(x, self.first.weight)
