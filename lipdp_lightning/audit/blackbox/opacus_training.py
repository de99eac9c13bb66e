"""Wraps DP-SGD by opacus, with flat clipping, as a training function for the black-box tests."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .black_box import HUBER, Checkpoint, Data, HyperParameters, Implementation, network
from .ours import OPTIMIZERS


def opacus_implementation(build: Callable[[], nn.Module] = network) -> Implementation:
    """Returns an implementation whose C is the clipping norm of each example's gradient, with noise sigma C per
    coordinate.
    """

    def train(data: Data, hyper: HyperParameters, start: Checkpoint | None) -> Checkpoint:
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer

        net = build()
        if start is not None:
            net.load_state_dict(dict(start.weights))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            private = GradSampleModule(net)
            optimizer = DPOptimizer(
                OPTIMIZERS[hyper.optimizer](private.parameters(), lr=hyper.learning_rate),
                noise_multiplier=hyper.noise_multiplier, max_grad_norm=hyper.bound, expected_batch_size=len(data[0]),
                generator=torch.Generator().manual_seed(hyper.seed),
            )  # fmt: skip
            if start is not None and start.optimizer and hyper.optimizer == "adam":
                optimizer.original_optimizer.load_state_dict(copy.deepcopy(dict(start.optimizer)))
            for _ in range(hyper.steps):
                optimizer.zero_grad(set_to_none=True)
                losses = F.huber_loss(private(data[0]), data[1], reduction="none", delta=HUBER).sum(1)
                losses.mean().backward()
                optimizer.step()
        weights = {n: p.detach().clone() for n, p in net.named_parameters()}
        return Checkpoint(weights, optimizer.original_optimizer.state_dict())

    def predict(checkpoint: Checkpoint, x: Tensor, hyper: HyperParameters) -> Tensor:
        net = build()
        net.load_state_dict(dict(checkpoint.weights))
        with torch.no_grad():
            result: Tensor = net.double()(x.double())
        return result

    def deviations(checkpoint: Checkpoint, hyper: HyperParameters, size: int) -> dict[str, float]:
        return dict.fromkeys(checkpoint.weights, hyper.noise_multiplier * hyper.bound)

    return Implementation("opacus", train, predict, deviations)
