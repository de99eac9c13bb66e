"""Seeded random graphs of supported operations, their weights on the boundary of a projection."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from random_parts import Arithmetic, Branches, Call, Functional, Parts, Reused, Shape, Shared, Tied
from torch import nn

from lipdp_lightning.bounds import certify
from lipdp_lightning.bounds.losses import (
    BinaryCrossEntropy,
    CosineSimilarity,
    CrossEntropy,
    Huber,
    Loss,
    MulticlassHinge,
)
from lipdp_lightning.layers import (
    GroupNorm,
    GroupSort,
    Householder,
    InstanceNorm,
    LayerNorm,
    MaxMin,
    Residual,
    ScaledL2Pool2d,
    TemperedSigmoid,
    make_private,
)

LARGEST = 160  # numbers in one example's activation


def _activation(rng: random.Random, shape: Shape) -> nn.Module:
    choices: list[nn.Module] = [
        nn.ReLU(), nn.LeakyReLU(0.3), nn.LeakyReLU(-1.4), nn.ELU(1.3), nn.SELU(), nn.GELU(),
        nn.GELU(approximate="tanh"), nn.SiLU(), nn.Mish(), nn.Hardswish(), nn.Tanh(), nn.Sigmoid(),
        TemperedSigmoid(1.5, 2.5, 0.4), nn.Softplus(0.7),
        nn.Hardtanh(-0.2, 0.7), nn.Softsign(), nn.ReLU6(), nn.CELU(0.6), nn.Softmax(1), nn.LogSigmoid(),
        nn.Hardsigmoid(), nn.Softshrink(0.1), nn.Tanhshrink(), Call(torch.tanh), Call(F.gelu),
        Call(lambda x: x.sigmoid()), Call(lambda x: F.softplus(x, beta=2.0)), Call(lambda x: x.clamp(0.1, 0.9)),
        Call(lambda x: -x.abs()), nn.Dropout(0.25), Call(lambda x: F.hardtanh(x, -0.5, 0.5)),
    ]  # fmt: skip
    if shape[0] % 2 == 0:
        choices += [MaxMin(), GroupSort(shape[0]), Householder(1.0), MaxMin()]
    return rng.choice(choices)


def _normalization(rng: random.Random, shape: Shape) -> nn.Module:
    groups = rng.choice([g for g in range(1, shape[0] + 1) if shape[0] % g == 0])
    alpha = rng.choice([0.1, 0.3, 1.0])
    return rng.choice([GroupNorm(groups, shape[0], alpha), InstanceNorm(alpha), LayerNorm(alpha)])


def _linear(rng: random.Random, shape: Shape) -> nn.Module:
    out, bias = rng.randint(2, 6), rng.random() < 0.7
    if rng.random() < 0.25:
        return Functional("linear", (out, shape[-1]), bias, {})
    return nn.Linear(shape[-1], out, bias=bias)


def _convolution(rng: random.Random, shape: Shape) -> nn.Module:
    rank = len(shape) - 1
    groups = rng.choice([g for g in range(1, shape[0] + 1) if shape[0] % g == 0])
    out = groups * rng.randint(1, 3)
    kernel = tuple(rng.randint(1, 3) for _ in range(rank))
    options = {
        "stride": tuple(rng.choice([1, 1, 2, 3]) for _ in range(rank)),
        "dilation": tuple(rng.choice([1, 1, 2]) for _ in range(rank)),
        "padding": tuple(rng.choice([0, 1, 1, 2]) for _ in range(rank)),
    }
    if rng.random() < 0.2:
        options |= {"padding": "same", "stride": (1,) * rank}
    bias = rng.random() < 0.7
    if rng.random() < 0.2:
        return Functional(f"conv{rank}d", (out, shape[0] // groups, *kernel), bias, {**options, "groups": groups})
    mode = rng.choice(["zeros", "zeros", "circular", "reflect", "replicate"])
    layer = nn.Conv1d if rank == 1 else nn.Conv2d
    return layer(shape[0], out, kernel, groups=groups, bias=bias, padding_mode=mode, **options)


def _pooling(rng: random.Random, shape: Shape) -> nn.Module:
    rank = len(shape) - 1
    kernel, stride = rng.randint(1, 3), rng.randint(1, 3)
    padding, ceil_mode = rng.randint(0, kernel // 2), rng.random() < 0.5
    average, maximum = ((nn.AvgPool1d, nn.MaxPool1d), (nn.AvgPool2d, nn.MaxPool2d))[rank - 1]
    adaptive = ((nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d), (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d))[rank - 1]
    include = rng.random() < 0.5
    divisor = {"divisor_override": rng.choice([None, None, 2])} if rank == 2 else {}
    choices = [
        average(kernel, stride, padding, ceil_mode=ceil_mode, count_include_pad=include, **divisor),
        maximum(kernel, stride, padding, dilation=rng.randint(1, 2), ceil_mode=ceil_mode),
        rng.choice(adaptive)(rng.randint(1, 4)),
        Call((lambda x: F.max_pool1d(x, 2, 1)) if rank == 1 else (lambda x: F.max_pool2d(x, 2, 1, 1))),
        Call((lambda x: F.avg_pool1d(x, 2, 1)) if rank == 1 else (lambda x: F.avg_pool2d(x, (2, 1), (1, 2)))),
    ]
    if rank == 2:
        choices += [ScaledL2Pool2d(2), nn.PixelUnshuffle(2)]
    return rng.choice(choices)


def _padding(rng: random.Random, shape: Shape) -> nn.Module:
    rank = len(shape) - 1
    sides = tuple(rng.randint(0, 1) for _ in range(2 * rank))
    mode, value = rng.choice(["constant", "reflect", "replicate", "circular"]), rng.choice([0.0, 0.3])
    if mode == "constant":
        cropped = tuple(s - rng.randint(0, 1) for s in sides)
        return Call(lambda x: F.pad(x, cropped, value=value))
    return Call(lambda x: F.pad(x, sides, mode=mode))


def _shape_change(rng: random.Random, shape: Shape) -> nn.Module:
    rank = len(shape) - 1
    choices = [
        nn.Flatten(), Call(lambda x: x.view(x.size(0), -1)), Call(lambda x: x.flip(1)),
        Call(lambda x: x[:, : max(1, shape[0] - 1)]),
        Call(lambda x: torch.roll(x, 1, 1)), Call(lambda x: x.unsqueeze(-1).squeeze(-1)),
    ]  # fmt: skip
    if rank == 1:
        choices += [
            Call(lambda x: x.mean(2)),
            Call(lambda x: x.transpose(1, 2)),
            Call(lambda x: x.sum(1, keepdim=True) + x),
        ]
    if rank == 2:
        choices += [Call(lambda x: x.mean((2, 3))), Call(lambda x: x.permute(0, 3, 1, 2)), Call(lambda x: x.flatten(2))]
    return rng.choice(choices)


def _leaf(rng: random.Random, shape: Shape) -> nn.Module:
    kinds: list[Callable[[random.Random, Shape], nn.Module]] = [_activation, _activation, _normalization, _shape_change]
    if len(shape) == 1:
        kinds += [_linear] * 4
    else:
        kinds += [_convolution] * 4 + [_pooling] * 2 + [_padding, _linear]
    return rng.choice(kinds)(rng, shape)


def _same_shape(rng: random.Random, shape: Shape) -> nn.Module:
    """A block that keeps the shape, with a layer inside."""
    act = _activation(rng, shape)
    if len(shape) == 1:
        return nn.Sequential(nn.Linear(shape[0], shape[0]), act)
    if len(shape) == 2:
        return nn.Sequential(
            act, nn.Conv1d(shape[0], shape[0], 3, padding=1, padding_mode=rng.choice(["zeros", "circular"]))
        )
    return nn.Sequential(act, nn.Conv2d(shape[0], shape[0], (3, 1), padding="same"))


def _block(rng: random.Random, shape: Shape) -> nn.Module:
    if rng.random() < 0.6:
        return _leaf(rng, shape)
    same = _same_shape(rng, shape)
    choices: list[nn.Module] = [
        Residual(same, body_scale=rng.choice([1.0, 0.5]), shortcut_scale=rng.choice([1.0, 0.5])),
        Residual(same, shortcut=_same_shape(rng, shape)),
        Shared(same, rng.choice(["sum", "cat", "twice"])),
        Branches(same, _activation(rng, shape)),
        Reused(same, rng.randint(2, 3)),
        Arithmetic(shape, rng.choice(["shift", "gain", "mask", "mix"])),
    ]
    if shape[0] % 2 == 0:
        choices += [Parts("chunk"), Parts("split"), Parts("unbind")]
    if len(shape) == 1:
        choices.append(Tied(shape[0]))
    return rng.choice(choices)


@dataclass(frozen=True)
class Graph:
    """A model and all that its certificate needs."""

    seed: int
    model: nn.Module
    input_shape: Shape
    input_bound: float
    loss: Loss

    @property
    def arguments(self) -> tuple[nn.Module, Shape, float, Loss]:
        return self.model, self.input_shape, self.input_bound, self.loss


def output_shape(module: nn.Module, shape: Shape) -> Shape | None:
    """One example's output shape, or None where torch refuses or the value grows too large or empty."""
    try:
        with torch.no_grad():
            out = module.eval()(torch.zeros((2, *shape)))
    except (RuntimeError, ValueError, IndexError):
        return None
    ok = out.dim() >= 2 and out.shape[0] == 2 and 0 < out[0].numel() <= LARGEST and bool(torch.isfinite(out).all())
    return tuple(out.shape[1:]) if ok else None


def random_graph(seed: int, depth: int | None = None) -> Graph:
    """The graph of a seed: up to 12 blocks and a linear head."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    shape = start = rng.choice([(6,), (3, 8), (2, 6, 5), (4, 9), (1, 7, 7), (8,)])
    blocks: list[nn.Module] = []
    for _ in range(depth or rng.randint(1, 12)):
        block = _block(rng, shape)
        after = output_shape(block, shape)
        if after is not None and len(after) <= 3:
            blocks.append(block)
            shape = after
            if isinstance(block, nn.Linear | nn.Conv1d | nn.Conv2d) and rng.random() < 0.3:
                blocks.append(nn.ReLU(inplace=True))
    if len(shape) > 1:
        blocks.append(nn.Flatten())
        shape = (int(torch.tensor(shape).prod()),)
    classes = rng.randint(2, 4)
    model = nn.Sequential(*blocks, nn.Linear(shape[0], classes))
    losses: Sequence[Loss] = (
        CrossEntropy(rng.choice([1.0, 0.2])), BinaryCrossEntropy(0.5), MulticlassHinge(), CosineSimilarity(0.4),
        Huber(0.5),
    )  # fmt: skip
    graph = Graph(seed, make_private(model), start, rng.choice([0.5, 1.0, 4.0]), rng.choice(losses))
    to_boundary(graph, rng)
    return graph


@torch.no_grad()
def to_boundary(graph: Graph, rng: random.Random) -> None:
    """Weights of random kinds, each scaled until its certified norm is a radius; biases of random size."""
    radius = rng.choice([0.7, 1.0, 1.0, 1.6])
    for parameter in graph.model.parameters():
        kind = rng.random()
        if kind < 0.25:
            parameter.copy_(parameter.abs())
        elif kind < 0.4:
            parameter.fill_(1.0)
        elif kind < 0.5 and parameter.dim() > 1:
            parameter.mul_((torch.rand_like(parameter) < 0.3).to(parameter.dtype))
        if parameter.dim() == 1:
            parameter.mul_(rng.choice([0.0, 0.3, 1.0]) / parameter.norm().clamp_min(1e-6))
    named = dict(graph.model.named_parameters())
    for group in certify(*graph.arguments).groups:
        largest = max((use.lipschitz for use in group.uses), default=0.0)
        for name in group.parameters:
            if named[name].dim() > 1 and largest > 0:
                named[name].mul_(radius / largest)
