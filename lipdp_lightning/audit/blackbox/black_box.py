"""Defines what a black-box test sees of an implementation: a function from data and hyper-parameters to a
checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Data = tuple[Tensor, Tensor]
Optimizer = Literal["sgd", "adam"]
WARM_UP = {"sgd": 1, "adam": 5}  # steps before a test, as in appendix B of paper 002
FEATURES, OUTPUTS = 8, 4
LARGEST_BATCH = 128


@dataclass(frozen=True)
class HyperParameters:
    """Hyper-parameters of one training run.

    ``bound`` is C: a clipping norm, or any public bound that the implementation's noise is in proportion to. Every
    step's batch is all of ``data``, so that nothing but the noise is random; ``seed`` chooses the noise.
    """

    bound: float
    noise_multiplier: float = 0.0
    steps: int = 1
    learning_rate: float = 0.1
    optimizer: Optimizer = "sgd"
    seed: int = 0

    def but(self, **changes: Any) -> HyperParameters:
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Checkpoint:
    """Weights by name, and the state of the optimizer."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    def flat(self) -> Tensor:
        return torch.cat([value.detach().double().flatten() for value in self.weights.values()])


@dataclass(frozen=True)
class Problem:
    """What a training function is tested on.

    Args:
        draw: maps a number of rows and a seed to made-up data, with targets far from what a network returns.
        losses: maps outputs and targets to one loss per row.
        resting: maps outputs to the targets at which their loss has no gradient.
        opposed: maps outputs to targets whose gradient is large.
    """

    draw: Callable[[int, int], Data]
    losses: Callable[[Tensor, Tensor], Tensor]
    resting: Callable[[Tensor], Tensor]
    opposed: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Implementation:
    """A training function under test.

    Args:
        train: maps (data, hyper-parameters, checkpoint to start from or None) to a checkpoint.
        predict: returns the outputs of a checkpoint under a bound, if that bounds inputs; in float64, since steps may
            be small.
        deviations: returns the claimed standard deviation of the noise in the sum, by parameter, for the
            Kolmogorov-Smirnov test.
        saturates: whether the claim stops growing where the bound no longer binds, as a certificate does. The noise is
            then tested only below that value of the bound, and in proportion to it.
        problem: the data and the loss; by default small regressions with a summed Huber loss.
    """

    name: str
    train: Callable[[Data, HyperParameters, Checkpoint | None], Checkpoint]
    predict: Callable[[Checkpoint, Tensor, HyperParameters], Tensor]
    deviations: Callable[[Checkpoint, HyperParameters, int], Mapping[str, float]] | None = None
    saturates: bool = False
    problem: Problem = field(default_factory=lambda: small_regression())

    def loss(self, checkpoint: Checkpoint, data: Data, hyper: HyperParameters) -> float:
        """Returns the sum of the losses of all rows."""
        with torch.no_grad():
            outputs = self.predict(checkpoint, data[0], hyper)
            return float(self.problem.losses(outputs, data[1].to(outputs.dtype)).sum())

    def resting(self, checkpoint: Checkpoint, x: Tensor, hyper: HyperParameters) -> Data:
        """Returns rows whose loss is at its minimum, so that their gradients are zero."""
        return x, self.problem.resting(self.predict(checkpoint, x, hyper)).float()

    def warmed(self, hyper: HyperParameters, data: Data) -> Checkpoint:
        """Returns the checkpoint from which tests start, a few noiseless steps in, so that Adam's state is not zero."""
        return self.train(data, hyper.but(noise_multiplier=0.0, steps=WARM_UP[hyper.optimizer]), None)


HUBER = 2.0


def network() -> nn.Module:
    """Returns the small network that the implementations of this package train; it has no biases and is homogeneous."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 16, bias=False), nn.ReLU(), nn.Linear(16, OUTPUTS, bias=False))


def random_data(size: int, seed: int = 0) -> Data:
    """Returns made-up data: inputs of norm 1/2 to 1, and targets far from the outputs of a network."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=generator)
    x = x / x.norm(dim=1, keepdim=True) * (0.5 + 0.5 * torch.rand(size, 1, generator=generator))
    return x, 3 * torch.randn(size, OUTPUTS, generator=generator)


def _opposed(outputs: Tensor, alpha: float = 10.0) -> Tensor:
    """Returns -alpha M(x), with alpha increased where M(x) is small, so that the gradient is as large as the loss
    allows."""
    norms = outputs.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return -alpha * outputs * (HUBER / norms).clamp_min(1.0)


def small_regression() -> Problem:
    """Returns regressions with a Huber loss summed over outputs, which the implementations of this package train."""
    return Problem(
        draw=random_data,
        losses=lambda outputs, targets: F.huber_loss(outputs, targets, reduction="none", delta=HUBER).sum(1),
        resting=lambda outputs: outputs,
        opposed=_opposed,
    )


def one_example_among_zeros(
    implementation: Implementation, start: Checkpoint, size: int, hyper: HyperParameters
) -> Data:
    """Returns the synthesised batch of paper 002, 3.1: one row with a large gradient, and none from all others.

    Larger batches have more rows of zero gradient; the one other row is always the same.
    """
    problem = implementation.problem
    x = problem.draw(LARGEST_BATCH, 17)[0][:size]
    outputs = implementation.predict(start, x, hyper)
    targets = problem.resting(outputs).clone()
    targets[0] = problem.opposed(outputs[:1])[0]
    return x, targets.float()
