"""Between the gradients of parameters and the flat float64 vector of a step.

On a CPU in pieces that stay in the cache: a sum of float64 and float32 would otherwise write a float64 copy of every
gradient first, as large as the noise itself.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..privacy.normals import Array
from ..threads import threads_for

if TYPE_CHECKING:
    from ..compiled import Loop

PIECE = 1 << 16

_Values = npt.NDArray[Any]


class Segments:
    """Consecutive segments of a flat vector."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.starts = [0, *itertools.accumulate(sizes)]

    @property
    def total(self) -> int:
        return self.starts[-1]

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(index, first, last) of what [start, stop) has of each segment, as positions in the flat vector."""
        index = max(0, bisect_right(self.starts, start) - 1)
        while index < len(self.starts) - 1 and self.starts[index] < stop:
            first, last = max(start, self.starts[index]), min(stop, self.starts[index + 1])
            if first < last:
                yield index, first, last
            index += 1


class FlatGradients:
    """The gradients of parameters, one after the other, beside a flat float64 vector that begins with them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.segments = Segments([p.numel() for p in self.parameters])

    def add_to(self, flat: Tensor, apart: Mapping[int, Tensor], share: float) -> None:
        """flat += share * (gradient + what is kept apart of it, by the parameter's id)."""
        for parameter, segment in zip(self.parameters, self._split(flat), strict=True):
            for part in (apart.get(id(parameter)), parameter.grad):
                if part is not None:
                    for piece, values in _pieces(segment, part.reshape(-1)):
                        # converted first: torch takes four times as long to add float32 to float64
                        piece.add_(values.to(piece.dtype), alpha=share)

    def write(self, flat: Tensor, divisor: float) -> None:
        """gradient <- flat / divisor; ``flat`` is divided too."""
        flat *= 1.0 / divisor  # a product takes a third of the time
        for parameter, segment in zip(self.parameters, self._split(flat), strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            gradient = parameter.grad
            if gradient.is_contiguous():
                gradient.view(-1).copy_(segment)
            else:
                gradient.copy_(segment.reshape(gradient.shape))

    def _split(self, flat: Tensor) -> Sequence[Tensor]:
        starts = self.segments.starts
        return [flat[start:stop] for start, stop in itertools.pairwise(starts)]


class Release:
    """The same two at once, for noise that comes in pieces, each to be multiplied by its deviation:
    gradient <- (deviation * noise + share * gradient) / divisor.

    No vector as long as all parameters is ever held. For parameters on a CPU whose dtype is
    among ``DTYPES``.

    Args:
        apart: sums that are not in a parameter's grad, by the parameter's id.
    """

    DTYPES = (torch.float32, torch.float64)

    def __init__(self, gradients: FlatGradients, apart: Mapping[int, Tensor], share: float, divisor: float) -> None:
        self._segments, self._share, self._factor = gradients.segments, share, 1.0 / divisor
        self._laid_out: list[tuple[Tensor, Tensor]] = []
        self._parts = [self._values(p, apart.get(id(p))) for p in gradients.parameters]

    def _values(self, parameter: nn.Parameter, apart: Tensor | None) -> tuple[_Values, _Values | None]:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad.contiguous()
        if gradient is not parameter.grad:
            self._laid_out.append((parameter.grad, gradient))
        return gradient.view(-1).numpy(), None if apart is None else apart.reshape(-1).numpy()

    def complete(self, start: int, noise: Array, deviation: float) -> None:
        """``noise`` begins at position ``start`` of the flat vector, and is multiplied by ``deviation`` first."""
        starts = self._segments.starts
        for index, first, last in self._segments.within(start, start + len(noise)):
            part = slice(first - starts[index], last - starts[index])
            gradient, apart = self._parts[index]
            own = noise[first - start : last - start]
            if apart is None:
                _complete(own, deviation, gradient[part], self._share, self._factor)
            else:
                own = own * deviation + np.multiply(apart[part], self._share, dtype=np.float64)
                _complete(own, 1.0, gradient[part], self._share, self._factor)

    def end(self) -> None:
        """Every piece has come."""
        for gradient, values in self._laid_out:
            gradient.copy_(values)


def _complete(noise: Array, deviation: float, gradient: _Values, share: float, factor: float) -> None:
    completion().shared(threads_for(len(noise)), noise, deviation, gradient, share, factor)


@lru_cache(maxsize=1)
def completion() -> Loop:
    """Compiled when it is asked for first: not for a command that releases nothing."""
    from .release_loop import complete

    return complete


def _pieces(flat: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if flat.device.type != "cpu" or len(flat) <= PIECE:
        return iter([(flat, values)])
    return zip(torch.split(flat, PIECE), torch.split(values, PIECE), strict=True)
