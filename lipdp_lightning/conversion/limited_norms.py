"""Scales trained weights down until their certified norms are within a limit."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor, nn

from ..bounds.certifier import CertificationError, Certifier
from ..bounds.losses import Loss
from ..norms.operators import NormSource, Operator


class AskedNorms(NormSource):
    """Remembers the largest norm that was computed for each weight."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[Tensor, float]] = {}

    def operator_norm(self, name: str, weight: Tensor, operator: Operator) -> float:
        norm = super().operator_norm(name, weight, operator)
        _, before = self.found.get(id(weight), (weight, 0.0))
        self.found[id(weight)] = weight, max(norm, before)
        return norm


def limit_norms(
    network: nn.Module, input_shape: tuple[int, ...], loss: Loss | nn.Module | str, largest: float
) -> tuple[str, ...]:
    """Scales every trained weight whose norm is above ``largest`` down to it, in place.

    Returns:
        The names of the weights that were scaled. If the network cannot be traced, there are none.
    """
    asked = AskedNorms()
    with suppress(CertificationError):  # a walk that ends at a bound out of range has asked for every norm
        Certifier(network, input_shape, 1.0, loss, norms=asked).certify()
    scaled = []
    for name, parameter in network.named_parameters():
        weight, norm = asked.found.get(id(parameter), (parameter, 0.0))
        if parameter.requires_grad and norm > largest:
            with torch.no_grad():
                weight.mul_(largest / norm)
            scaled.append(name)
    return tuple(scaled)
