"""A release on one CPU, without a vector as long as all parameters: noise goes from words to gradients in one loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from ..privacy.grid import grid_shift
from ..privacy.normals import Words
from .flat import FlatGradients

if TYPE_CHECKING:
    from ..compiled import Loop

BLOCK = 1 << 13
"""Normals that a thread makes at once: they stay in its cache until the entries that they belong to are complete."""


class Release:
    """gradient <- grid(deviation * noise + share * gradient) / divisor and votes <- grid(votes + deviation * noise).

    Guarantee: after the words of all positions, each once, every entry has the noise of its own position in the flat
    vector (gradients, votes), in float64, and is a function of a multiple of its group's grid step (privacy/grid.py).
    For parameters on a CPU whose dtype is among ``DTYPES``.

    Args:
        apart: sums that are not in a parameter's grad, by the parameter's id; they are multiplied by the share, too.
        votes: float64, contiguous; the share is part of them.
        groups: of the flat vector, each with its deviation.
        threads: that share the work; they do not change a bit.
        grid: whether sums are rounded to their grid.
    """

    DTYPES = (torch.float32, torch.float64)

    def __init__(
        self, gradients: FlatGradients, apart: Mapping[int, Tensor], votes: Tensor, share: float, divisor: float,
        groups: Sequence[int], deviations: Sequence[float], threads: int = 1, grid: bool = True,
    ) -> None:  # fmt: skip
        assert votes.dtype == torch.float64 and votes.is_contiguous()
        self._laid_out: list[tuple[Tensor, Tensor]] = []
        own = zip(gradients.parameters, gradients.sizes, strict=True)
        self._parts = [self._part(p, apart.get(id(p)), size) for p, size in own] + [(votes, None)]
        assert len(groups) == len(deviations), "entries without noise"
        places = [(t.data_ptr(), t.element_size(), 0 if b is None else b.data_ptr()) for t, b in self._parts]
        table, numbers, starts = [], [], gradients.segments.starts
        shifts = [grid_shift(deviation) if grid else 0.0 for deviation in deviations]
        of_gradient, of_vote = (share, 1.0 / divisor), (1.0, 1.0)
        for part, group, first, last in gradients.met_by(groups, votes.numel()):
            (place, size, beside), skipped = places[part], first - starts[part]
            table.append((first, last, place + size * skipped, size == 8, beside and beside + 8 * skipped))
            own_numbers = of_vote if part == len(starts) - 1 else of_gradient
            numbers.append((deviations[group], *own_numbers, shifts[group]))
        # columns as in release_loop.py
        self._segments = np.array(table, dtype=np.int64).reshape(-1, 5)
        self._numbers = np.array(numbers, dtype=np.float64).reshape(-1, 4)
        self._threads = threads
        self._draws = np.empty((0, 0, 0))

    def _part(self, parameter: nn.Parameter, apart: Tensor | None, numel: int) -> tuple[Tensor, Tensor | None]:
        """The gradient and what is beside it, each contiguous."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        # their memory is read as it lies, which a negated view would not be meant by
        assert gradient.dtype in self.DTYPES and gradient.device.type == "cpu" and not gradient.is_neg()
        if not gradient.is_contiguous():
            gradient = gradient.contiguous()
            self._laid_out.append((parameter.grad, gradient))
        beside = None if apart is None else apart.to(torch.float64).contiguous()
        assert gradient.numel() == numel and (beside is None or beside.numel() == numel)
        return gradient, beside

    def complete(self, start: int, words: Words) -> None:
        """``words`` as of ``words_of``: their first rows begin at position ``start`` of the flat vector."""
        if len(self._draws) == 0:
            self._draws = np.empty((self._threads, len(words), BLOCK))
        release_loop().shared(self._threads, words, start, self._segments, self._numbers, self._draws)

    def end(self) -> None:
        """All words have come."""
        for gradient, values in self._laid_out:
            gradient.copy_(values)


@lru_cache(maxsize=1)
def release_loop() -> Loop:
    """Compiled when it is asked for first: not for a command that releases nothing."""
    from .release_loop import release

    return release
