"""The Strategy as it is, one that records what it sends, and ones that are broken on purpose."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lipdp_lightning.mechanism.noise import StepNoise
from lipdp_lightning.privacy.keys import derive_key
from lipdp_lightning.privacy.sampling import local_slice, poisson_sample
from lipdp_lightning.training import PrivateStrategy


def recording(kind: type[PrivateStrategy]) -> type[PrivateStrategy]:
    """Keeps what this rank puts into the sum over ranks."""

    class Recording(kind):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.sent: list[Tensor] = []
            self._to_owners: list[Tensor] = []

        def _all_reduce(self, total: Tensor, to: int | None = None) -> None:
            self._to_owners.append(total.clone())
            if to is None:  # the last one of a step
                self.sent.append(torch.cat(self._to_owners))
                self._to_owners = []
            super()._all_reduce(total, to)

    return Recording


def fixed_chunks(kind: type[PrivateStrategy], count: int) -> type[PrivateStrategy]:
    """So many micro-batches, also where the expected batch is smaller than that."""

    class Fixed(kind):  # type: ignore[misc, valid-type]
        chunks = count

    return Fixed


class _Patched(PrivateStrategy):
    """Changes the noise of a set-up mechanism."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        mechanism = self.mechanism
        if mechanism is not None:
            noise_of = mechanism._noise_of
            mechanism._noise_of = lambda step: self.changed(noise_of(step))  # type: ignore[method-assign]

    def changed(self, noise: StepNoise) -> StepNoise:
        return noise


class RankZeroOnly(_Patched):
    """All the noise on rank 0: the sum is right, and every other rank sends its raw sum."""

    def changed(self, noise: StepNoise) -> StepNoise:
        return replace(noise, share=1.0 if self.is_global_zero else 0.0)


class RankZeroShare(_Patched):
    """Rank 0 adds its share and the others none."""

    def changed(self, noise: StepNoise) -> StepNoise:
        return noise if self.is_global_zero else replace(noise, share=0.0)


class SigmaOverWorld(_Patched):
    """sigma / W on each rank instead of sigma / sqrt(W)."""

    def changed(self, noise: StepNoise) -> StepNoise:
        return replace(noise, share=noise.share / math.sqrt(self.world_size))


class SameSeed(_Patched):
    """Every rank draws what rank 0 draws."""

    def changed(self, noise: StepNoise) -> StepNoise:
        mechanism = self.mechanism
        assert mechanism is not None and mechanism._step is not None
        return StepNoise.of(mechanism._secret, mechanism._step, replace(mechanism.place, rank=0), mechanism.digest)


class OwnSeedReplicated(_Patched):
    """Replicated noise that is another draw on every rank."""

    def changed(self, noise: StepNoise) -> StepNoise:
        return replace(noise, key=derive_key(noise.key, "own", self.global_rank))


class MeanOverRanks(PrivateStrategy):
    """The mean that a reducer would leave is not undone."""

    def _all_reduce(self, total: Tensor, to: int | None = None) -> None:
        super()._all_reduce(total, to)
        total /= self.world_size


class OwnSeedSharded(_Patched):
    """Every rank draws all of the noise that its share of the parameters needs from the same stream."""

    def changed(self, noise: StepNoise) -> StepNoise:
        return FirstStreamAgain(noise.key, noise.share, noise.samples, noise.grid)


class FirstStreamAgain(StepNoise):
    def stream(self, number: int) -> int:
        return 0


class NotGathered(PrivateStrategy):
    """Every rank keeps what it has of the others' parameters."""

    def _gather(self, owners: Any) -> None:
        pass


class MeanOverChunks(PrivateStrategy):
    """Lightning's division by the number of micro-batches is not undone."""

    def backward(self, closure_loss: Tensor, *args: Any, **options: Any) -> Tensor:
        return super().backward(closure_loss / self.chunks, *args, **options)


class EmptyWithoutNoise(_Patched):
    """A rank whose local batch is empty adds nothing."""

    def training_step(self, batch: Any, *args: Any, **options: Any) -> Any:
        self.rows = len(batch[0])
        return super().training_step(batch, *args, **options)

    def changed(self, noise: StepNoise) -> StepNoise:
        return noise if self.rows else replace(noise, share=0.0)


class EmptySkipped(PrivateStrategy):
    """A sampler that drops empty local batches and goes on with the next one."""

    def _draw(self, rows: int) -> Callable[[int, int], Tensor]:
        assert self.plan is not None
        rate, shift = self.plan.sample_rate, [0]

        def share(step: int, chunk: int) -> Tensor:
            sample = poisson_sample(self._secret, step, rows, rate)
            return local_slice(sample, self.global_rank, self.world_size, chunk, self.chunks)

        def draw(step: int, chunk: int) -> Tensor:
            found = share(step + shift[0], chunk)
            while not len(found):
                shift[0] += 1
                found = share(step + shift[0], chunk)
            return found

        return draw


class OwnSample(PrivateStrategy):
    """Every rank samples for itself from the common seed, at the full rate: the same rows on all."""

    def _draw(self, rows: int) -> Callable[[int, int], Tensor]:
        assert self.plan is not None
        rate = self.plan.sample_rate
        return lambda step, chunk: local_slice(poisson_sample(self._secret, step, rows, rate), 0, 1, chunk, self.chunks)


STRATEGIES: dict[str, type[PrivateStrategy]] = {
    "": PrivateStrategy,
    "noise on rank 0 only": RankZeroOnly,
    "a share on rank 0 only": RankZeroShare,
    "same seed on all ranks": SameSeed,
    "own seeds in replicated mode": OwnSeedReplicated,
    "one stream for all shards": OwnSeedSharded,
    "weights are not gathered": NotGathered,
    "sigma / W": SigmaOverWorld,
    "mean over ranks not undone": MeanOverRanks,
    "mean over micro-batches not undone": MeanOverChunks,
    "no noise from an empty local batch": EmptyWithoutNoise,
    "empty local batch dropped": EmptySkipped,
    "every rank samples alike": OwnSample,
}
