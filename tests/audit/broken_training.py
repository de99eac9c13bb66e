"""DP-SGD from scratch, and every way of getting it wrong: training functions for the black-box tests."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from lipdp_lightning.audit.blackbox.black_box import HUBER, Checkpoint, Data, HyperParameters, Implementation, network
from lipdp_lightning.audit.blackbox.ours import OPTIMIZERS

MICRO_BATCH = 4


def per_example_gradients(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    def loss(parameters: dict[str, Tensor], row: Tensor, target: Tensor) -> Tensor:
        return F.huber_loss(functional_call(net, parameters, row), target, reduction="sum", delta=HUBER)

    parameters = {n: p.detach() for n, p in net.named_parameters()}
    return vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)


def norms(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten(1) for g in gradients.values()], 1).norm(dim=1)


def clipped(gradients: dict[str, Tensor], bound: float) -> dict[str, Tensor]:
    factor = (bound / norms(gradients).clamp_min(1e-30)).clamp_max(1.0)
    return {n: torch.einsum("b,b...->b...", factor, g) for n, g in gradients.items()}


def summed(fault: str, gradients: dict[str, Tensor], x: Tensor, bound: float) -> dict[str, Tensor]:
    """The sum over the batch, before noise."""
    size = len(x)
    if fault == "no clipping":
        return {n: g.sum(0) for n, g in gradients.items()}
    if fault == "the mini-batch is clipped":
        mean = clipped({n: g.mean(0, keepdim=True) for n, g in gradients.items()}, bound)
        return {n: size * g[0] for n, g in mean.items()}
    if fault == "micro-batches are clipped":
        parts = [{n: g[i : i + MICRO_BATCH].mean(0, keepdim=True) for n, g in gradients.items()}
                 for i in range(0, size, MICRO_BATCH)]  # fmt: skip
        small = [clipped(part, bound) for part in parts]
        return {n: sum(part[n][0] for part in small) * size / len(parts) for n in gradients}
    if fault == "each layer is clipped to the whole bound":
        return {n: clipped({n: g}, bound)[n].sum(0) for n, g in gradients.items()}
    if fault == "coordinates are clipped":
        return {n: g.clamp(-bound, bound).sum(0) for n, g in gradients.items()}
    if fault == "inputs are scaled by the batch's largest":
        scale = 1 / x.norm(dim=1).max()
        return {n: scale * g.sum(0) for n, g in clipped(gradients, bound).items()}
    return {n: g.sum(0) for n, g in clipped(gradients, bound).items()}


def noise_of(
    fault: str, like: Tensor, first: bool, hyper: HyperParameters, size: int, source: torch.Generator
) -> Tensor:
    deviation = hyper.noise_multiplier * hyper.bound
    noise = torch.randn(like.shape, generator=source)
    if fault == "noise without the bound":
        return hyper.noise_multiplier * noise
    if fault == "no noise":
        return 0 * noise
    if fault == "noise is divided by the batch twice":
        return deviation * noise / size
    if fault == "noise on the first layer only":
        return deviation * noise * first
    if fault == "the variance is taken for the deviation":
        return deviation * hyper.noise_multiplier * noise
    if fault == "Laplace noise of the same variance":
        uniform = torch.rand(like.shape, generator=source) - 0.5
        return -deviation / 2**0.5 * uniform.sign() * torch.log1p(-2 * uniform.abs())
    return deviation * noise


def dp_sgd(fault: str = "", build: Callable[[], nn.Module] = network) -> Implementation:
    def train(data: Data, hyper: HyperParameters, start: Checkpoint | None) -> Checkpoint:
        net = build()
        if start is not None:
            net.load_state_dict(dict(start.weights))
        optimizer = OPTIMIZERS[hyper.optimizer](net.parameters(), lr=hyper.learning_rate)
        if start is not None and start.optimizer and hyper.optimizer == "adam":
            optimizer.load_state_dict(copy.deepcopy(dict(start.optimizer)))
        source = torch.Generator().manual_seed(0 if fault == "a fixed seed" else hyper.seed)
        size = len(data[0])
        for _ in range(hyper.steps):
            total = summed(fault, per_example_gradients(net, *data), data[0], hyper.bound)
            for index, (name, parameter) in enumerate(net.named_parameters()):
                noise = noise_of(fault, parameter, index == 0, hyper, size, source)
                parameter.grad = (total[name] + noise) / size
            optimizer.step()
        weights = {n: p.detach().clone() for n, p in net.named_parameters()}
        return Checkpoint(weights, optimizer.state_dict())

    def predict(checkpoint: Checkpoint, x: Tensor, hyper: HyperParameters) -> Tensor:
        net = build()
        net.load_state_dict(dict(checkpoint.weights))
        with torch.no_grad():
            return net.double()(x.double())

    def deviations(checkpoint: Checkpoint, hyper: HyperParameters, size: int) -> dict[str, float]:
        return dict.fromkeys(checkpoint.weights, hyper.noise_multiplier * hyper.bound)

    return Implementation(fault or "DP-SGD", train, predict, deviations)
