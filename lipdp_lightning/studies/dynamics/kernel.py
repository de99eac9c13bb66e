"""Computes the neural tangent kernel of a small network by layers, with factors of examples.

With f the outputs of n examples, m each, H_r = (df/dw_r)(df/dw_r)^T is the kernel of layer r, and H = sum_r H_r. If
example i's gradient in layer r is multiplied by c_ir, the loss falls along the flow at the rate of paper 003, equations
4.3 and 4.4:

    dL/dt = - (dL/df) K (dL/df)^T,    K = sum_r H_r C_r,    C_r = diag(c_1r, ..., c_nr),

which is H C for one factor per example. K is symmetric for every H if and only if all factors are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def layers_of(network: nn.Module) -> dict[str, list[str]]:
    """Returns the trained parameters of every layer, by the layer's path; a weight and its bias are one layer."""
    layers: dict[str, list[str]] = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
    if not layers:
        raise ValueError("the network trains nothing, and has no kernel. HINT: call requires_grad_() on a layer.")
    return layers


def jacobians(network: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Returns df_i/dw_r of every example i and layer r, of shape (n, m, parameters of r)."""
    layers = layers_of(network)
    trained = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}

    def outputs(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(network, parameters, (row.unsqueeze(0),))
        return found.reshape(-1)

    each = torch.func.vmap(torch.func.jacrev(outputs), in_dims=(None, 0))(trained, x)
    return {path: torch.cat([each[name].flatten(2) for name in names], dim=2) for path, names in layers.items()}


def layer_kernels(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns H_r from the Jacobians, of shape (n m, n m)."""
    kernels = {}
    for path, jacobian in found.items():
        rows = jacobian.flatten(0, 1)
        kernels[path] = rows @ rows.T
    return kernels


def weighted_kernel(kernels: Mapping[str, Tensor], factors: Mapping[str, Tensor]) -> Tensor:
    """Returns K = sum_r H_r C_r for one factor per example and layer."""
    total = torch.zeros_like(next(iter(kernels.values())))
    for path, kernel in kernels.items():
        outputs = len(kernel) // len(factors[path])
        total = total + kernel * factors[path].repeat_interleave(outputs)
    return total


@dataclass(frozen=True)
class Spectrum:
    """The quantities about K in table 1 of paper 003, each in units of the largest modulus of an eigenvalue.

    Attributes:
        asymmetry: the largest entry of |K - K^T|, in units of the largest of |K|.
        quadratic: the smallest eigenvalue of (K + K^T) / 2; below zero, x^T K x < 0 for some x.
        eigenvalue: the smallest real part of an eigenvalue of K.
        imaginary: the largest imaginary part.
    """

    asymmetry: float
    quadratic: float
    eigenvalue: float
    imaginary: float


def spectrum(kernel: Tensor) -> Spectrum:
    """Returns the spectrum of a kernel with factors; that of a kernel of zeros, which moves nothing, is all zeros."""
    values = torch.linalg.eigvals(kernel)
    scale = float(values.abs().max())
    if scale == 0:
        return Spectrum(0.0, 0.0, 0.0, 0.0)
    symmetric = torch.linalg.eigvalsh((kernel + kernel.T) / 2)
    return Spectrum(
        float((kernel - kernel.T).abs().max() / kernel.abs().max()),
        float(symmetric.min()) / scale,
        float(values.real.min()) / scale,
        float(values.imag.abs().max()) / scale,
    )
