"""Releases the sums of a step with noise, as a Gaussian mechanism.

A step's normals are keyed by the secret, the step, the rank, the world size and the state digest. Every parameter has
streams of its own under that key. Noise is drawn, scaled and added in float64: an fp32 normal stops at 5.77,
which by itself costs a delta of 3.5e-5 per coordinate on the reference case of docs/guarantee.md. Rounding the noised
sum to the parameter's dtype is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.normals import SECURE_SAMPLES, release_
from ..privacy.grid import grid_shift
from ..privacy.keys import derive_key
from .step_errors import Mode, check_request, deviations_without_bound

_SHARED, _OWNERS = b"every rank", b"the owner of each parameter"


@dataclass(frozen=True)
class Place:
    """The place of a process among those that share a step.

    With mode 'distributed', every rank adds a share of the noise from a key of its own to its LOCAL sum before the
    all-reduce: the sum over ranks has the full variance, and no un-noised sum exists anywhere. With 'replicated', every
    rank adds the same noise to the reduced sum. With 'sharded', every sum is reduced to the rank that owns its
    parameter, which alone adds the noise that all would have added.
    """

    rank: int = 0
    world_size: int = 1
    mode: Mode = "distributed"


@dataclass(frozen=True)
class StepNoise:
    """The noise that one process adds in one step: a pure function of its fields.

    Attributes:
        key: 32 bytes that belong to this step, state and process.
        share: The factor of each deviation: 1 / sqrt(world size) where every rank adds a part of the noise.
        samples: The number of independent draws whose sum, divided by the root of their number, each coordinate
            receives, as proposed by Holohan and Braghin (2021). The law of four follows the normal one out to 18.7
            deviations; a single draw ends at 9.3 and is coarse beyond 8.
        grid: Whether noised sums are rounded to the public grid of their deviation (privacy/grid.py), so that no last
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
        check_request(step, place.rank, place.world_size, place.mode, digest)
        whose: dict[str, int | bytes] = {"distributed": place.rank, "replicated": _SHARED, "sharded": _OWNERS}
        samples = SECURE_SAMPLES if secure else 1
        key = derive_key(secret, "streams", samples, step, whose[place.mode], place.world_size, digest)
        share = 1 / math.sqrt(place.world_size) if place.mode == "distributed" else 1.0
        return cls(key, share, samples, grid)

    def stream(self, number: int) -> int:
        """Returns the first of the streams of the sum of this number; it has one for each sample."""
        return number * self.samples


@dataclass(frozen=True)
class Sum:
    """One sum that a step releases.

    Attributes:
        values: The sum, or this process's part of it, and afterwards its release.
        deviation: The standard deviation of the noise on the sum over all processes.
        share: The factor of ``values`` before noise is added: 1 / views, for a mean over views.
        divisor: The public number that the noisy sum is divided by.
        apart: A further part of the sum, in float64.
    """

    values: Tensor
    deviation: float
    share: float = 1.0
    divisor: float = 1.0
    apart: Tensor | None = None

    def total(self) -> Tensor:
        """Returns the sum without noise, flat and in float64."""
        total = self.values.reshape(-1).to(torch.float64)
        if self.apart is not None:
            total = total + self.apart.reshape(-1)
        return total * self.share if self.share != 1.0 else total


def check_deviations(sums: Collection[Sum]) -> None:
    """Raises ValueError if the noise of a sum has no finite deviation of at least 0."""
    if not all([math.isfinite(one.deviation) and one.deviation >= 0 for one in sums]):
        raise deviations_without_bound([one.deviation for one in sums])


def complete_(sums: Mapping[int, Sum], noise: StepNoise) -> None:
    """Replaces the sums of these numbers by their releases, grid(sum + noise) / divisor, where they lie.

    Sum number j is given streams of its own. Each coordinate has a normal of its own, multiplied by a deviation that a
    public certificate decides, so the sums together are one release of a Gaussian mechanism.

    Raises:
        ValueError: if a deviation is not finite and at least 0.
    """
    check_deviations(sums.values())
    streams = [noise.stream(number) for number in sums]
    deviations = [one.deviation * noise.share for one in sums.values()]
    shifts = [grid_shift(own) if noise.grid else 0.0 for own in deviations]
    for one, own, shift, stream in zip(sums.values(), deviations, shifts, streams, strict=True):
        release_(
            one.values, noise.key, own, stream=stream, apart=one.apart, samples=noise.samples, share=one.share,
            shift=shift, factor=1.0 / one.divisor,
        )  # fmt: skip
