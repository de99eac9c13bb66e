"""The Gaussian noise of a step: keyed by what the step starts from, split over ranks, always float64.

One flat stream per (secret, step, rank, state digest) serves all groups: group k owns the positions of its
segment, so no two groups share a draw, and neither do two ranks, two steps, or a step and its changed
replay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Literal, get_args

import torch
from torch import Tensor

from lipdp_lightning.privacy.normals import Words, transformation, words_of
from lipdp_lightning.privacy.randomness import CounterStream, derive_key

Mode = Literal["distributed", "replicated"]

_SHARED = b"every rank"
_MINIMAL_DIGEST = 16
_REQUEST_HINT = "HINT: pass state_digest(weights, plan digest, ...), the process's rank and the world size."
_SECURE_SAMPLES = 4  # a square, so that the scale 1/sqrt(4) is exact


def gaussian(key: bytes, count: int, threads: int = 1) -> Tensor:
    """`count` standard normals of the key, float64 on the CPU, the same bits for any number of threads.

    Box-Muller on 64-bit words (see privacy/normals.py): values out to 9.34 occur with their probability.
    An fp32 normal stops at 5.77, which by itself costs a delta of 3.5e-5 per coordinate on the reference
    case of docs/guarantee.md. A draw is a function of (key, count): draws of one key and different counts
    are not independent.
    """
    return CounterStream(key).normal(count, threads)


class NoiseSource:
    """Draws a step's noise from the run's secret: the same arguments give the same bits, whatever came before.

    `secure` makes every coordinate the sum of four independent draws, halved, as proposed by Holohan and Braghin
    (2021). Its law follows the normal one out to 18.7 deviations; a single draw ends at 9.3 and is coarse beyond 8.
    It does not hide in which float64 values a sum ends, which tells two sums apart (Mironov 2012): who releases a
    noised sum rounds it to its public grid (privacy/grid.py), with `secure` and without. Four times the work.
    """

    def __init__(self, secret: bytes, *, secure: bool = False, threads: int = 1) -> None:
        derive_key(secret, "noise")  # refuses a short secret here and not at the first step
        transformation()  # is compiled here
        self._secret = secret
        self._samples = _SECURE_SAMPLES if secure else 1
        self._given_back: list[Tensor] = []
        self.threads = threads

    def draw(
        self,
        step: int,
        sizes: Sequence[int],
        rank: int,
        world_size: int,
        mode: Mode,
        digest: bytes,
        deviations: Sequence[float],
    ) -> Tensor:
        """The noise rank `rank` adds at `step`: flat, float64, CPU; segment k has standard deviation
        deviations[k] ("replicated") or deviations[k] / sqrt(world_size) ("distributed").

        * distributed: every rank has its own key and adds its draw to its LOCAL sum before the all-reduce;
          the sum over ranks has the full variance and no un-noised sum exists anywhere.
        * replicated: the key does not name the rank; every rank adds the same draw to the reduced sum. The
          digest must be the same bytes on every rank (rank 0's, broadcast), or the replicas drift apart.

        Add it in float64; rounding the noised sum to the parameters' type is post-processing.

        `digest` is `state_digest` of the weights the step starts from and of all else the sum depends on.
        It makes an exact replay repeat its noise and any other continuation draw fresh noise. Without it,
        two continuations of a checkpoint with different learning rates release the difference of two true
        sums.
        """
        noise = self.standard(step, sizes, rank, world_size, mode, digest)
        return scale_(noise, sizes, deviations, world_size, mode)

    def standard(
        self, step: int, sizes: Sequence[int], rank: int, world_size: int, mode: Mode, digest: bytes
    ) -> Tensor:
        """The same draw before scaling: standard normals, needed before the deviations are known."""
        key = self._key(step, sizes, rank, world_size, mode, digest)
        if self._samples == 1:
            return CounterStream(key).normal(sum(sizes), self.threads, self._reusable())
        return self._summed(key, sum(sizes))

    def words(
        self, step: int, sizes: Sequence[int], rank: int, world_size: int, mode: Mode, digest: bytes
    ) -> Iterator[tuple[int, Words]]:
        """What the draw of ``standard`` is made of, in pieces: no more than a few are held at once.

        Who transforms, sums and adds them (release_loop.py) multiplies segment k by entry k of ``scales``.
        """
        key = self._key(step, sizes, rank, world_size, mode, digest)
        total = sum(sizes) + sum(sizes) % 2
        keys = [key] if self._samples == 1 else self._keys_of_samples(key)
        return words_of([CounterStream(own).normals(total, self.threads) for own in keys], total)

    def _key(self, step: int, sizes: Sequence[int], rank: int, world_size: int, mode: Mode, digest: bytes) -> bytes:
        _check_request(step, sizes, rank, world_size, mode, digest)
        owner = _SHARED if mode == "replicated" else rank
        return derive_key(self._secret, "noise", step, owner, world_size, digest, *sizes)

    def _summed(self, key: bytes, total: int) -> Tensor:
        noise = torch.zeros(total, dtype=torch.float64, device="cpu")
        for own in self._keys_of_samples(key):
            noise.add_(gaussian(own, total, self.threads))
        return noise.mul_(1 / math.sqrt(self._samples))

    def _keys_of_samples(self, key: bytes) -> list[bytes]:
        return [derive_key(key, "sample", sample) for sample in range(self._samples)]

    def give_back(self, draw: Tensor) -> None:
        """Nobody reads this draw any more: another may be written into its memory."""
        self._given_back[:] = [draw]

    def _reusable(self) -> Tensor | None:
        try:
            return self._given_back.pop()  # to one thread only
        except IndexError:
            return None


def scale_(noise: Tensor, sizes: Sequence[int], deviations: Sequence[float], world_size: int, mode: Mode) -> Tensor:
    """Multiply segment k of the flat buffer by one rank's deviation."""
    start = 0
    for size, scale in zip(sizes, scales(sizes, deviations, world_size, mode), strict=True):
        noise[start : start + size] *= scale
        start += size
    return noise


def scales(sizes: Sequence[int], deviations: Sequence[float], world_size: int, mode: Mode) -> list[float]:
    """What one rank multiplies its standard normals by: over ranks, variances add."""
    problems = [
        f"the noise deviation of group {index} is {deviation}; noise needs a finite deviation >= 0."
        for index, deviation in enumerate(deviations)
        if not (math.isfinite(deviation) and deviation >= 0)
    ]
    if len(sizes) != len(deviations):
        problems.append(f"{len(sizes)} groups, {len(deviations)} deviations: a group would get no noise.")
    if problems:
        raise ValueError("\n".join([*problems, "HINT: take sizes and deviations from the same certificate."]))
    share = math.sqrt(world_size) if mode == "distributed" else 1.0
    return [deviation / share for deviation in deviations]


def _check_request(step: int, sizes: Sequence[int], rank: int, world_size: int, mode: str, digest: bytes) -> None:
    problems = []
    if step < 0:
        problems.append(f"step is {step}; steps count from 0.")
    if any(size < 0 for size in sizes):
        problems.append(f"group sizes are {list(sizes)}; they count parameters.")
    if not 0 <= rank < world_size:
        problems.append(f"rank is {rank} in a world of {world_size}; the noise of the ranks would not add up.")
    if mode not in get_args(Mode):
        problems.append(f"mode is {mode!r}; it is one of {', '.join(get_args(Mode))}.")
    if len(digest) < _MINIMAL_DIGEST:
        problems.append(
            f"the state digest has {len(digest)} bytes; without it a changed replay repeats the noise "
            "of this step, and the difference of the two releases is free of noise."
        )
    if problems:
        raise ValueError("\n".join([*problems, _REQUEST_HINT]))


class NoisePrefetcher:
    """Draws a step's standard normals in a thread while a GPU computes the forward and backward pass.

    The draw depends on the weights before the step, not on the gradient. `start` once the weights are
    final, `take` when the deviations are known. An exception of the thread is raised by `take`. `close` (or
    leaving the `with` block) ends the thread.
    """

    def __init__(self, source: NoiseSource) -> None:
        self._source = source
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="noise")
        self._pending: tuple[int, tuple[int, ...], int, Mode, list[float] | None, Future[Tensor]] | None = None
        self._expected: list[float] | None = None

    def expect(self, deviations: Sequence[float]) -> None:
        """The draw that starts next is to be taken with these deviations: it is scaled in the thread, too."""
        self._expected = list(deviations)

    def start(
        self,
        step: int,
        sizes: Sequence[int],
        rank: int,
        world_size: int,
        mode: Mode,
        digest: bytes | Callable[[], bytes],
    ) -> None:
        """Begin the draw of a step; an earlier draw that was not taken is dropped.

        A callable digest is evaluated in the thread: the weights must not change before `take`.
        """
        self._drop()
        shape = tuple(sizes)
        deviations, self._expected = self._expected, None

        def work() -> Tensor:
            state = digest if isinstance(digest, bytes) else digest()
            if deviations is None:
                return self._source.standard(step, shape, rank, world_size, mode, state)
            return self._source.draw(step, shape, rank, world_size, mode, state, deviations)

        self._pending = (step, shape, world_size, mode, deviations, self._pool.submit(work))

    def take(self, step: int, deviations: Sequence[float]) -> Tensor:
        """The noise of the started step, bit-identical to NoiseSource.draw. Each draw can be taken once."""
        assert self._pending is not None and self._pending[0] == step, "take() of a step that was not started"
        _, sizes, world_size, mode, expected, future = self._pending
        self._pending = None
        drawn = future.result()
        if expected is None:
            return scale_(drawn, sizes, deviations, world_size, mode)
        assert expected == list(deviations), "the draw is scaled by other deviations than it is taken with"
        return drawn

    def close(self) -> None:
        """Wait for a draw under way and end the thread; may be called twice."""
        self._drop()
        self._pool.shutdown(wait=True)

    def _drop(self) -> None:
        if self._pending is not None:
            self._pending[-1].cancel()
            self._pending = None

    def __enter__(self) -> NoisePrefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
