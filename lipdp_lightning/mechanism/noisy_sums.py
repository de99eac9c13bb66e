"""Where noise meets the summed gradients: on one CPU piece by piece, elsewhere as one flat float64 vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..privacy.grid import round_to_grid_
from .flat import FlatGradients
from .noise import Mode, NoisePrefetcher, NoiseSource, scales
from .place import Place, Reduce
from .release import Release, release_loop


class NoisySums:
    """The sums that a step releases: gradients of all parameters, and votes beside them.

    Guarantee: what ``release_`` leaves behind is a function of the sum over ranks of (share * sums + noise), each entry
    rounded to the public grid of its group (privacy/grid.py), and every entry of the flat vector (gradients, votes) has
    a draw of its own.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], source: NoiseSource, place: Place, *, grid: bool = True
    ) -> None:
        """``grid=False`` leaves sums as they are: to measure differences of releases, and never for a release."""
        self.gradients, self._source, self._place, self._grid = FlatGradients(parameters), source, place, grid
        self._device = parameters[0].device
        self.prefetcher = NoisePrefetcher(source)
        # As one vector where ranks add vectors or a GPU holds them: while a GPU computes the passes, a thread draws it.
        # On CPUs, passes and noise share the processors: nothing is gained by drawing earlier, and it would take 8
        # bytes for every parameter while the passes need most memory.
        alone = self._device.type == "cpu" and place.world_size == 1
        self.whole = not (alone and all(p.dtype in Release.DTYPES for p in parameters))
        if not self.whole:
            release_loop()
        self._request: tuple[int, Sequence[int], int, int, Mode, bytes] | None = None
        self._drawing = False

    def begin(self, step: int, sizes: Sequence[int], digest: bytes, deviations: Sequence[float]) -> None:
        """What the noise of this step is a function of; the weights it was computed from must not change before
        ``release_``.
        """
        self._request = (step, sizes, self._place.rank, self._place.world_size, self._place.mode, digest)
        self._drawing = self._device.type != "cpu"
        if self._drawing:
            self.prefetcher.expect(deviations)
            self.prefetcher.start(*self._request)

    def release_(
        self, deviations: Sequence[float], apart: Mapping[int, Tensor], votes: Tensor, share: float, divisor: float,
        reduce: Reduce | None,
    ) -> Tensor:  # fmt: skip
        """grad <- grid(sum over ranks of share * (grad + apart) + noise) / divisor, in place; the noisy votes.

        ``apart`` holds sums that are not in a parameter's grad, by the parameter's id. ``reduce`` sums a float64 tensor
        over ranks. In distributed mode the noise is added before it, so no process ever holds an un-noised sum; a rank
        without gradients contributes zeros. What a rank hands over is on the grid, so that their sum is exact, on the
        grid, and the same in any order of summation.
        """
        assert self._request is not None, "release_() without begin()"
        votes = votes * share if votes.numel() else votes
        if reduce is None and not self.whole:
            noisy = self._in_pieces(deviations, apart, votes, share, divisor)
        else:
            noisy = self._as_a_whole(deviations, apart, votes, share, divisor, reduce)
        self._request = None
        return noisy

    def close(self) -> None:
        """End the noise thread."""
        self.prefetcher.close()

    def _in_pieces(
        self, deviations: Sequence[float], apart: Mapping[int, Tensor], votes: Tensor, share: float, divisor: float
    ) -> Tensor:
        assert self._request is not None
        _, sizes, _, world_size, mode, _ = self._request
        factors, threads = scales(sizes, deviations, world_size, mode), self._source.threads
        release = Release(self.gradients, apart, votes, share, divisor, sizes, factors, threads, self._grid)
        for start, words in self._source.words(*self._request):
            release.complete(start, words)
        release.end()
        return votes

    def _as_a_whole(
        self, deviations: Sequence[float], apart: Mapping[int, Tensor], votes: Tensor, share: float, divisor: float,
        reduce: Reduce | None,
    ) -> Tensor:  # fmt: skip
        assert self._request is not None
        if self._drawing:
            drawn = self.prefetcher.take(self._request[0], deviations)
        else:
            drawn = self._source.draw(*self._request, deviations)
        total = drawn.to(self._device)
        _, sizes, _, world_size, mode, _ = self._request
        factors = scales(sizes, deviations, world_size, mode)
        replicated = mode == "replicated" and reduce is not None
        sums = torch.zeros_like(total) if replicated else total
        self.gradients.add_to(sums, apart, share)
        sums[self.gradients.segments.total :] += votes
        if self._grid and not replicated:
            round_to_grid_(total, sizes, factors)
        if reduce is not None:
            reduce(sums)
        if replicated:
            total += sums
        if self._grid and replicated:
            round_to_grid_(total, sizes, factors)
        noisy = total[self.gradients.segments.total :].clone()  # its memory is given back
        self.gradients.write(total, divisor)
        self._source.give_back(drawn)
        return noisy
