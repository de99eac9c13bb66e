"""Integrates the gradient flow dw_r/dt = -(1/n) sum_i c_ir g_ir of paper 003 (4.2), by small explicit steps on all
rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...bounds.losses import Loss
from .example_factors import Factors
from .kernel import Spectrum, jacobians, layer_kernels, layers_of, spectrum, weighted_kernel


@dataclass(frozen=True)
class Moment:
    """One point of the flow: the mean loss, its rate of decay by the kernel, and the kernel's spectrum.

    Attributes:
        rate: -dL/dt over the rate of the largest eigenvalue alone; it is below zero where the loss rises.
    """

    time: float
    loss: float
    rate: float
    spectrum: Spectrum
    clipped: float


@dataclass(frozen=True)
class Flow:
    """The moments of a flow, the first at its start."""

    moments: tuple[Moment, ...]

    @property
    def monotone(self) -> bool:
        """True if the loss falls at every moment, up to rounding."""
        return min(m.rate for m in self.moments) >= -ROUNDING

    @property
    def remaining(self) -> float:
        """The last loss over the first."""
        return self.moments[-1].loss / self.moments[0].loss

    def worst(self, name: str) -> float:
        """Returns the largest asymmetry or imaginary part, or the smallest eigenvalue of either kind."""
        values = [getattr(moment.spectrum, name) for moment in self.moments]
        return max(values) if name in ("asymmetry", "imaginary") else min(values)


ROUNDING = 1e-9  # rounding of eigenvalues and rates in float64, in units of the largest eigenvalue


@dataclass(frozen=True)
class State:
    """The network on all rows: losses, their gradient in the outputs, and the examples' gradients by layer."""

    losses: Tensor
    residuals: Tensor
    jacobians: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]

    @property
    def norms(self) -> dict[str, Tensor]:
        return {path: gradient.norm(dim=1) for path, gradient in self.gradients.items()}


def state_of(network: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> State:
    """Returns the state at the present weights."""
    with torch.no_grad():
        outputs = network(x)
    outputs.requires_grad_()
    losses = loss.per_example(outputs, y)
    (residuals,) = torch.autograd.grad(losses.sum(), outputs)
    residuals = residuals.flatten(1)
    found = jacobians(network, x)
    gradients = {path: torch.einsum("nm,nmd->nd", residuals, jacobian) for path, jacobian in found.items()}
    return State(losses.detach(), residuals, found, gradients)


def integrate(
    network: nn.Module, x: Tensor, y: Tensor, loss: Loss, factors: Factors, *, steps: int = 1000, share: float = 0.2
) -> Flow:
    """Follows the flow in place, in float64; a step is ``share`` of 1 / (the largest eigenvalue's rate).

    Time is measured so that the mean factor is 1 at the start, since a factor common to all examples belongs to the
    step size.
    """
    if x.dtype != torch.float64 or any(p.dtype != torch.float64 for p in network.parameters()):
        raise ValueError("signs of eigenvalues are lost in rounding. HINT: use network.double() and x.double().")
    trained = dict(network.named_parameters())
    layers = layers_of(network)
    moments: list[Moment] = []
    time, unit = 0.0, 0.0
    for _ in range(steps):
        state = state_of(network, x, y, loss)
        chosen = factors(x, state.norms)
        mean = float(torch.stack(list(chosen.values())).mean())
        unit = unit or mean or 1.0
        chosen = {path: factor / unit for path, factor in chosen.items()}
        kernel = weighted_kernel(layer_kernels(state.jacobians), chosen)
        moment, fastest = _moment(time, state, kernel, chosen)
        moments.append(moment)
        if fastest == 0:
            break  # every factor is zero, so nothing moves any more
        size = share / fastest
        with torch.no_grad():
            for path, names in layers.items():
                move = -(chosen[path].unsqueeze(1) * state.gradients[path]).mean(0) * size
                for name, part in zip(names, move.split([trained[n].numel() for n in names]), strict=True):
                    trained[name].add_(part.reshape(trained[name].shape))
        time += size
    return Flow(tuple(moments))


def _moment(time: float, state: State, kernel: Tensor, factors: Mapping[str, Tensor]) -> tuple[Moment, float]:
    """Returns the moment, and the largest rate of the flow."""
    count = len(state.losses)
    cotangent = state.residuals.flatten() / count
    fastest = float(torch.linalg.eigvals(kernel).abs().max()) / count
    decay = float(cotangent @ kernel @ cotangent)
    largest = fastest * count * float(cotangent.square().sum())
    each = torch.stack(list(factors.values()))
    unlike = float((each != each.max()).double().mean())
    rate = decay / largest if largest > 0 else 0.0
    return Moment(time, float(state.losses.mean()), rate, spectrum(kernel), unlike), fastest
