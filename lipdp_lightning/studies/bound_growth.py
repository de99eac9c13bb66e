"""Measures how the bound on a gradient grows with the layers' Lipschitz constant K and the depth D (001, theorem 1).

A network of D dense layers, each K times an orthogonal matrix with a bias of norm B, sees an input of norm X. The
input of layer d has a norm of at most K^(d-1) X + B (1 + K + ... + K^(d-2)), and its cotangent one of at most L
K^(D-d). Over all layers the bound is therefore of the order L sqrt(D) K^(D-1) X for K > 1 and of L sqrt(D) (X + 1 + B
D) for K = 1, and the network without biases attains the terms in X. Theorem 1 states L K^D (X + B) for K > 1, without
the root, and for K = 1 without biases L (X + sqrt(D)), a sum where the bound is a product: it holds for a fixed X, and
not in X and D together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lipdp_lightning.bounds import certify
from lipdp_lightning.bounds.losses import Huber

WIDTH = 8
# one output beyond the threshold has a gradient of exactly 1
LOSS = Huber(1.0)


@dataclass(frozen=True)
class Growth:
    """The certified bound on the gradient of all layers together, and the norm at one worst input."""

    bound: float
    measured: float


def network(constant: float, depth: int, bias: float, seed: int = 0) -> nn.Sequential:
    """Returns the dense layers; the last one has a single output, in the direction that the layer before sends
    inputs."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for index in range(depth):
        last = index == depth - 1
        layer = nn.Linear(WIDTH, 1 if last else WIDTH, bias=bias > 0)
        matrix = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))[0]
        with torch.no_grad():
            layer.weight.copy_(constant * matrix[: len(layer.weight)])
            if layer.bias is not None:
                layer.bias.fill_(bias / math.sqrt(len(layer.bias)))
        layers.append(layer)
    return nn.Sequential(*layers)


def worst_input(layers: nn.Sequential, size: float) -> Tensor:
    """Returns the input of this norm that the layers' matrices send to the largest output."""
    *before, row = [p.detach() for name, p in layers.named_parameters() if name.endswith("weight")]
    for weight in reversed(before):
        row = row @ weight
    return size * row / row.norm()


def growth(constant: float, depth: int, bias: float, size: float) -> Growth:
    """Returns the certified bound of such a network, and its gradient at the worst input with a target far away."""
    layers = network(constant, depth, bias)
    certificate = certify(layers, input_shape=(WIDTH,), input_bound=size, loss=LOSS)
    bound = math.hypot(*certificate.sensitivities("worst_case").values())
    layers = layers.double()  # squares of small gradients vanish in float32
    outputs = layers(worst_input(layers, size))
    gradients = torch.autograd.grad(LOSS.per_example(outputs, outputs.detach() - 1e6).sum(), list(layers.parameters()))
    return Growth(bound, math.hypot(*(float(g.norm()) for g in gradients)))


def printed(constant: float, depth: int, bias: float, size: float) -> float:
    """Returns what theorem 1 has inside its O, for L = 1."""
    if constant == 1:
        return size + math.sqrt(depth) + math.sqrt(bias * size * depth) + bias * depth**1.5
    return constant**depth * (size + bias) + (1 if constant < 1 else 0)
