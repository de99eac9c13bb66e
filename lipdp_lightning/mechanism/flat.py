"""Between the gradients of parameters and the flat float64 vector of a step.

On a CPU in pieces that stay in the cache: a sum of float64 and float32 would otherwise write a float64 copy of every
gradient first, as large as the noise itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

PIECE = 1 << 16


class Segments:
    """Consecutive segments of a flat vector."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.starts = [0, *itertools.accumulate(sizes)]

    @property
    def total(self) -> int:
        return self.starts[-1]

    def meet(self, other: Segments) -> Iterator[tuple[int, int, int, int]]:
        """(index, index in the other, first, last) of all that a segment shares with one of the other, in order."""
        index = of_other = 0
        while index < len(self.starts) - 1 and of_other < len(other.starts) - 1:
            ends = self.starts[index + 1], other.starts[of_other + 1]
            first, last = max(self.starts[index], other.starts[of_other]), min(ends)
            if first < last:
                yield index, of_other, first, last
            index, of_other = index + (ends[0] == last), of_other + (ends[1] == last)


class FlatGradients:
    """The gradients of parameters, one after the other, beside a flat float64 vector that begins with them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.sizes = [p.numel() for p in self.parameters]
        self.segments = Segments(self.sizes)
        self._met: dict[tuple[int, ...], list[tuple[int, int, int, int]]] = {}

    def met_by(self, groups: Sequence[int], more: int) -> list[tuple[int, int, int, int]]:
        """``Segments.meet`` of gradients, and ``more`` entries behind them, with groups; worked out once."""
        key = more, *groups
        found = self._met.get(key)
        if found is None:
            own, owners = Segments([*self.sizes, more]), Segments(groups)
            assert own.total == owners.total, "entries without noise"
            self._met = {key: (found := list(own.meet(owners)))}
        return found

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


def _pieces(flat: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if flat.device.type != "cpu" or len(flat) <= PIECE:
        return iter([(flat, values)])
    return zip(torch.split(flat, PIECE), torch.split(values, PIECE), strict=True)
