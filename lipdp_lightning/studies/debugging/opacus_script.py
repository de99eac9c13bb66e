"""Trains with opacus, as `lipdp debug --script FILE.py:train` takes it; three more functions make common mistakes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INPUT_SHAPE = (12,)
LOSS = "cross_entropy"
Training = Callable[..., Mapping[str, Any]]


def network() -> nn.Module:
    """Returns the network that is trained."""
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))


def training(clip: str = "per example", noise: str = "calibrated") -> Training:
    """Returns a training function.

    Args:
        clip: "per example", by opacus; "mini-batch", which clips the gradient of the whole batch; or "none".
        noise: "calibrated", of deviation multiplier times bound; "uncalibrated", of deviation multiplier; or "none".
    """

    def run(
        net: nn.Module, x: Tensor, y: Tensor, *, bound: float, noise_multiplier: float, steps: int,
        learning_rate: float, optimizer: str, seed: int, state: Mapping[str, Any] | None,
    ) -> Mapping[str, Any]:  # fmt: skip
        deviation = noise_multiplier * {"calibrated": bound, "uncalibrated": 1.0, "none": 0.0}[noise]
        source = torch.Generator().manual_seed(seed)
        own: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer](net.parameters(), lr=learning_rate)
        if state:
            own.load_state_dict(state)
        wrapped: Any = net
        stepped = own
        if clip == "per example":
            from opacus import GradSampleModule
            from opacus.optimizers import DPOptimizer

            wrapped = GradSampleModule(net)
            # opacus multiplies its noise multiplier by the bound
            options: dict[str, Any] = {"max_grad_norm": bound, "expected_batch_size": len(x), "generator": source}
            stepped = DPOptimizer(own, noise_multiplier=deviation / bound, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(steps):
                stepped.zero_grad(set_to_none=True)
                F.cross_entropy(wrapped(x), y).backward()
                if clip == "mini-batch":
                    nn.utils.clip_grad_norm_(net.parameters(), bound)
                if clip != "per example":
                    for parameter in net.parameters():
                        assert parameter.grad is not None
                        parameter.grad += deviation / len(x) * torch.randn(parameter.shape, generator=source)
                stepped.step()
        found: Mapping[str, Any] = own.state_dict()
        return found

    return run


train = training()
train_without_clipping = training(clip="none")
train_with_a_clipped_mini_batch = training(clip="mini-batch")
train_with_uncalibrated_noise = training(noise="uncalibrated")
