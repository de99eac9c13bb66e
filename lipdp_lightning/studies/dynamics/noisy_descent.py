"""Follows the noisy gradient descent of paper 003 (4.1) towards its gradient flow, for ever shorter steps (fact
4.1)."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from ...bounds.losses import Loss
from .example_factors import Factors
from .flow import state_of
from .kernel import layers_of


def noisy_descent(
    network: nn.Module, x: Tensor, y: Tensor, loss: Loss, factors: Factors, *, time: float, steps: int,
    deviation: float, seed: int = 0,
) -> Tensor:  # fmt: skip
    """Returns the weights after `steps` steps of size time / steps, w <- w - size / n (sum_i c_i g_i + deviation N(0,
    I)).

    The noise moves the weights by size / n times a sum of `steps` normals, whose deviation is time / (n sqrt(steps))
    times that of one: it vanishes for short steps, and the flow without noise is left, which is fact 4.1. But each of
    these steps spends privacy. At a fixed epsilon the deviation of one step grows with sqrt(steps), and what the noise
    does to the weights stays.

    Args:
        network: a network in float64, which is left as it is.
        x: all rows.
        y: their targets.
        loss: the loss of one example.
        factors: the factor of every example's gradient.
        time: the time of the flow.
        steps: the number of steps that it is divided into.
        deviation: the deviation of the noise in the sum of all gradients.
        seed: the seed of the noise.
    """
    moving = copy.deepcopy(network)
    trained = dict(moving.named_parameters())
    generator = torch.Generator().manual_seed(seed)
    size = time / steps
    for _ in range(steps):
        state = state_of(moving, x, y, loss)
        chosen = factors(x, state.norms)
        with torch.no_grad():
            for path, names in layers_of(moving).items():
                total = (chosen[path].unsqueeze(1) * state.gradients[path]).sum(0)
                noise = deviation * torch.randn(total.shape, generator=generator, dtype=total.dtype)
                move = -size / len(x) * (total + noise)
                for name, part in zip(names, move.split([trained[n].numel() for n in names]), strict=True):
                    trained[name].add_(part.reshape(trained[name].shape))
    return torch.cat([p.detach().flatten() for p in trained.values()])


def distance_to_the_flow(
    network: nn.Module, x: Tensor, y: Tensor, loss: Loss, factors: Factors, *, time: float, steps: int,
    deviation: float, seeds: int = 5,
) -> float:  # fmt: skip
    """Returns the root of the mean squared distance that the noise makes, over several seeds."""
    still = noisy_descent(network, x, y, loss, factors, time=time, steps=steps, deviation=0.0)
    squares = []
    for seed in range(seeds):
        noisy = noisy_descent(network, x, y, loss, factors, time=time, steps=steps, deviation=deviation, seed=seed)
        squares.append(float((noisy - still).square().sum()))
    return math.sqrt(sum(squares) / seeds)
