"""Between the gradients of parameters and the one flat float64 vector of a step.

On a CPU in pieces that stay in the cache: a sum of float64 and float32 would otherwise write a float64 copy of every
gradient first, as large as the noise itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PIECE = 1 << 17


def add_to(flat: Tensor, values: Tensor, share: float) -> None:
    """flat += share * values."""
    for piece, part in _pieces(flat, values.reshape(-1)):
        piece.add_(part, alpha=share)


def divide_into(parameter: Tensor, flat: Tensor, divisor: float) -> None:
    """grad <- flat / divisor, rounded once; ``flat`` is divided too."""
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    gradient = parameter.grad
    if not gradient.is_contiguous():
        gradient.copy_(flat.div_(divisor).reshape(gradient.shape))
        return
    for piece, part in _pieces(flat, gradient.view(-1)):
        part.copy_(piece.div_(divisor))


def _pieces(flat: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if flat.device.type != "cpu" or len(flat) <= PIECE:
        return iter([(flat, values)])
    return zip(torch.split(flat, PIECE), torch.split(values, PIECE), strict=True)
