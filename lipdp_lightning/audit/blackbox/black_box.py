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
    """

    name: str
    train: Callable[[Data, HyperParameters, Checkpoint | None], Checkpoint]
    predict: Callable[[Checkpoint, Tensor, HyperParameters], Tensor]
    deviations: Callable[[Checkpoint, HyperParameters, int], Mapping[str, float]] | None = None
    saturates: bool = False

    def loss(self, checkpoint: Checkpoint, data: Data, hyper: HyperParameters) -> float:
        """Returns the summed Huber loss, which the implementations of this package train."""
        with torch.no_grad():
            outputs = self.predict(checkpoint, data[0], hyper)
            return float(F.huber_loss(outputs, data[1].to(outputs.dtype), reduction="sum", delta=HUBER))

    def resting(self, checkpoint: Checkpoint, x: Tensor, hyper: HyperParameters) -> Data:
        """Returns rows whose loss is at its minimum, y = M(x), so that their gradients are zero."""
        return x, self.predict(checkpoint, x, hyper).float()

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


def one_example_among_zeros(
    implementation: Implementation, start: Checkpoint, size: int, hyper: HyperParameters, alpha: float = 10.0
) -> Data:
    """Returns the synthesised batch of paper 002, 3.1: y_B = -alpha M(x_B) for one row, y_i = M(x_i) for all others.

    Where M(x_B) is small, alpha is increased so that the gradient of the row is as large as the loss allows. Larger
    batches have more rows of zero gradient; the one other row is always the same.
    """
    x = random_data(LARGEST_BATCH, seed=17)[0][:size]
    outputs = implementation.predict(start, x, hyper)
    targets = outputs.clone()
    targets[0] = -alpha * outputs[0] * max(1.0, HUBER / max(float(outputs[0].norm()), 1e-12))
    return x, targets.float()
