"""Releases the sums of a step with noise, as a Gaussian mechanism.

Every parameter has a stream of normals of its own in every step, keyed by the secret, the step, the rank, the world
size, the state digest and the parameter. Noise is drawn, scaled and added in float64: an fp32 normal stops at 5.77,
which by itself costs a delta of 3.5e-5 per coordinate on the reference case of docs/guarantee.md. Rounding the noised
sum to the parameter's dtype is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..kernels.loops import gpu_kernels
from ..kernels.normals import normals
from ..privacy.grid import grid_shift
from ..privacy.keys import derive_key

Mode = Literal["distributed", "replicated"]
Reduce = Callable[[Tensor], None]
"""Sums a float64 tensor over all processes, in place."""

SECURE_SAMPLES = 4  # a square, so that the scale 1/sqrt(4) is exact
PIECE = 1 << 14  # normals at a time: they stay in a processor's cache
_SHARED = b"every rank"
_MINIMAL_DIGEST = 16


@dataclass(frozen=True)
class Place:
    """The place of a process among those that share a step.

    With mode 'distributed', every rank adds a share of the noise from a key of its own to its LOCAL sum before the
    all-reduce: the sum over ranks has the full variance, and no un-noised sum exists anywhere. With 'replicated', every
    rank adds the same noise to the reduced sum.
    """

    rank: int = 0
    world_size: int = 1
    mode: Mode = "distributed"


@dataclass(frozen=True)
class StepNoise:
    """The noise that one process adds in one step: a pure function of its fields.

    Attributes:
        key: 32 bytes that belong to this step, state and process.
        share: what a deviation is multiplied by: 1 / sqrt(world size) where every rank adds a part of the noise.
        samples: independent draws that are summed for each coordinate, and divided by the root of their number, as
            proposed by Holohan and Braghin (2021). The law of four follows the normal one out to 18.7 deviations; a
            single draw ends at 9.3 and is coarse beyond 8.
        grid: whether noised sums are rounded to the public grid of their deviation (privacy/grid.py), so that no last
            bit tells which sum is beneath the noise (Mironov 2012). False is for an audit that measures how far an
            example moves a sum, and never for a release.
    """

    key: bytes
    share: float = 1.0
    samples: int = 1
    grid: bool = True

    @classmethod
    def of(
        cls, secret: bytes, step: int, place: Place, digest: bytes, secure: bool = False, grid: bool = True
    ) -> StepNoise:
        """Returns the noise of a step.

        Args:
            digest: names all that the released sum is a function of besides the secret (``state_digest``). An exact
                replay then repeats its noise, and any other continuation draws fresh noise. Without it, two
                continuations of a checkpoint with different learning rates release the difference of two true sums.

        Raises:
            ValueError: if the request cannot be private, with every reason.
        """
        problems = []
        if step < 0:
            problems.append(f"step is {step}; steps count from 0.")
        if not 0 <= place.rank < place.world_size:
            problems.append(f"rank is {place.rank} in a world of {place.world_size}; the shares would not add up.")
        if place.mode not in get_args(Mode):
            problems.append(f"mode is {place.mode!r}; it is one of {', '.join(get_args(Mode))}.")
        if len(digest) < _MINIMAL_DIGEST:
            problems.append(
                f"the state digest has {len(digest)} bytes; without it a changed replay repeats the noise of this "
                "step, and the difference of the two releases is free of noise."
            )
        if problems:
            hint = "HINT: pass state_digest(weights, plan digest, ...), the process's rank and the world size."
            raise ValueError("\n".join([*problems, hint]))
        owner = _SHARED if place.mode == "replicated" else place.rank
        samples = SECURE_SAMPLES if secure else 1
        key = derive_key(secret, "noise", samples, step, owner, place.world_size, digest)
        share = 1 / math.sqrt(place.world_size) if place.mode == "distributed" else 1.0
        return cls(key, share, samples, grid)

    def key_of(self, number: int) -> bytes:
        """Returns the key of the normals of the parameter of this number."""
        return derive_key(self.key, "parameter", number)

    def normals(self, number: int, start: int, count: int) -> Tensor:
        """Returns standard normals ``start`` to ``start + count`` of the parameter of this number."""
        key = self.key_of(number)
        total = normals(key, 0, start, count)
        for sample in range(1, self.samples):
            total += normals(key, sample, start, count)
        return total if self.samples == 1 else total.mul_(1 / math.sqrt(self.samples))


@dataclass(frozen=True)
class Sum:
    """One sum that a step releases.

    Attributes:
        values: holds the sum, or this process's part of it, and afterwards what is released.
        deviation: of the noise on the sum over all processes.
        share: what ``values`` are multiplied by before noise is added: 1 / views, for a mean over views.
        divisor: public; what the noisy sum is divided by.
        apart: a further part of the sum, in float64.
    """

    values: Tensor
    deviation: float
    share: float = 1.0
    divisor: float = 1.0
    apart: Tensor | None = None

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """Yields the sum without noise in pieces, in float64, each with the position of its first entry.

        A piece stays in a processor's cache; elsewhere, each would be a launch of its own.
        """
        values = self.values.reshape(-1)
        further = None if self.apart is None else self.apart.reshape(-1)
        size = PIECE if values.is_cpu else max(1, len(values))
        for start in range(0, len(values), size):
            piece = values[start : start + size].to(torch.float64)
            if further is not None:
                piece = piece + further[start : start + size]
            yield start, piece * self.share if self.share != 1.0 else piece

    def write(self, released: Iterable[tuple[int, Tensor]]) -> None:
        """Stores what is released, given in pieces that have not been divided yet."""
        values = self.values if self.values.is_contiguous() else torch.empty_like(self.values).contiguous()
        flat = values.view(-1)
        for start, piece in released:
            flat[start : start + len(piece)] = piece * (1.0 / self.divisor) if self.divisor != 1.0 else piece
        if values is not self.values:
            self.values.copy_(values)


def release_(sums: Sequence[Sum], noise: StepNoise, reduce: Reduce | None = None, replicated: bool = False) -> None:
    """Replaces each sum by its release, grid(sum over processes + noise) / divisor, in place.

    Sum number j is given the stream of parameter j. Each coordinate has a normal of its own, multiplied by a deviation
    that a public certificate decides, so the sums together are one release of a Gaussian mechanism. What a process
    hands over is on the grid already, so that the sum over processes is exact, on the grid, and the same in any order.

    Args:
        reduce: sums a tensor over processes; None if there is one process.
        replicated: whether the noise is added to the reduced sum rather than to each process's part of it.

    Raises:
        ValueError: if a deviation is not finite and at least 0.
    """
    wrong = [f"{j}: {s.deviation}" for j, s in enumerate(sums) if not (math.isfinite(s.deviation) and s.deviation >= 0)]
    if wrong:
        raise ValueError(
            f"noise needs a finite deviation >= 0, and some sums have another ({', '.join(wrong)}).\n"
            "HINT: take the deviations from the certificate that the sums were computed under."
        )
    if reduce is None:
        for number, one in enumerate(sums):
            _complete(one, noise, number)
        return
    whole = torch.cat([piece for one in sums for _, piece in one.parts()])
    segments = whole.split_with_sizes([one.values.numel() for one in sums])
    if not replicated:
        _add_noise(sums, segments, noise)
    reduce(whole)
    if replicated:
        _add_noise(sums, segments, noise)
    for one, segment in zip(sums, segments, strict=True):
        one.write([(0, segment)])


def _add_noise(sums: Sequence[Sum], segments: Sequence[Tensor], noise: StepNoise) -> None:
    for number, (one, segment) in enumerate(zip(sums, segments, strict=True)):
        _complete(Sum(segment, one.deviation), noise, number)


def _complete(one: Sum, noise: StepNoise, number: int) -> None:
    """Replaces a sum by its release, where it lies.

    A GPU's kernel returns the bits that the pieces below have on a CPU, and draws the noise where it is added.
    """
    own = one.deviation * noise.share
    shift = grid_shift(own) if noise.grid else 0.0
    kernels = gpu_kernels(one.values.device) if own > 0 else None
    if kernels is None:
        one.write(_noisy(one.parts(), own, shift, noise, number))
    else:
        kernels.release_(
            one.values, noise.key_of(number), own, apart=one.apart, samples=noise.samples, share=one.share, shift=shift,
            factor=1.0 / one.divisor,
        )  # fmt: skip


def _noisy(
    pieces: Iterable[tuple[int, Tensor]], own: float, shift: float, noise: StepNoise, number: int
) -> Iterator[tuple[int, Tensor]]:
    for start, total in pieces:
        if own > 0:
            drawn = noise.normals(number, start, len(total)).mul_(own)
            total = drawn.to(total.device).add_(total)
        if shift > 0:
            total = total.add(shift).sub_(shift)
        yield start, total
