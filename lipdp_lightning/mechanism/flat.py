"""Between the gradients of parameters and the flat float64 vector of a step.

On a CPU in pieces that stay in the cache: a sum of float64 and float32 would otherwise write a float64 copy of every
gradient first, as large as the noise itself.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

PIECE = 1 << 15  # the most that torch works on in the calling thread alone


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
        self._parameters = list(parameters)
        self.segments = Segments([p.numel() for p in self._parameters])

    def add_to(self, flat: Tensor, apart: Mapping[int, Tensor], share: float) -> None:
        """flat += share * (gradient + what is kept apart of it, by the parameter's id)."""
        for parameter, segment in zip(self._parameters, self._split(flat), strict=True):
            for part in (parameter.grad, apart.get(id(parameter))):
                if part is not None:
                    for piece, values in _pieces(segment, part.reshape(-1)):
                        piece.add_(values, alpha=share)

    def write(self, flat: Tensor, divisor: float) -> None:
        """gradient <- flat / divisor, rounded once; ``flat`` is divided too."""
        for parameter, segment in zip(self._parameters, self._split(flat), strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            gradient = parameter.grad
            if gradient.is_contiguous():
                for piece, part in _pieces(segment, gradient.view(-1)):
                    part.copy_(piece.div_(divisor))
            else:
                gradient.copy_(segment.div_(divisor).reshape(gradient.shape))

    def _split(self, flat: Tensor) -> Sequence[Tensor]:
        starts = self.segments.starts
        return [flat[start:stop] for start, stop in itertools.pairwise(starts)]


class Release:
    """The same two at once, for a flat vector that comes in pieces, in any order and from several threads.

    A piece is overwritten by the sum that it completes, and no vector as long as all parameters is ever held.
    """

    def __init__(self, gradients: FlatGradients, apart: Mapping[int, Tensor], share: float, divisor: float) -> None:
        self._segments, self._share, self._divisor = gradients.segments, share, divisor
        self._laid_out: list[tuple[Tensor, Tensor]] = []
        self._parts = [self._values(p, apart.get(id(p))) for p in gradients._parameters]

    def _values(self, parameter: nn.Parameter, apart: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad.contiguous()
        if gradient is not parameter.grad:
            self._laid_out.append((parameter.grad, gradient))
        return gradient.view(-1), None if apart is None else apart.reshape(-1)

    def complete(self, start: int, piece: Tensor) -> None:
        """gradient <- (piece + share * gradient) / divisor at the piece's place; ``piece`` begins at ``start``."""
        starts = self._segments.starts
        for index, first, last in self._segments.within(start, start + len(piece)):
            gradient, apart = (None if v is None else v[first - starts[index] : last - starts[index]]
                               for v in self._parts[index])  # fmt: skip
            assert gradient is not None
            for offset in range(0, last - first, PIECE):
                rows = slice(offset, min(offset + PIECE, last - first))
                sums = piece[first - start : last - start][rows]
                sums.add_(gradient[rows], alpha=self._share)
                if apart is not None:
                    sums.add_(apart[rows], alpha=self._share)
                gradient[rows].copy_(sums.div_(self._divisor))

    def end(self) -> None:
        """Every piece has come."""
        for gradient, values in self._laid_out:
            gradient.copy_(values)


def _pieces(flat: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if flat.device.type != "cpu" or len(flat) <= PIECE:
        return iter([(flat, values)])
    return zip(torch.split(flat, PIECE), torch.split(values, PIECE), strict=True)
