"""The noise of a step: lipdp_lightning/mechanism/noise.py, and what a check of it must catch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from private_step import drawn_otherwise
from scipy import stats
from torch import Tensor

from lipdp_lightning.kernels import normals as normals_module
from lipdp_lightning.kernels.normals import PIECE, normals
from lipdp_lightning.mechanism.noise import Mode, Place, StepNoise, Sum
from lipdp_lightning.mechanism.reductions import release_
from lipdp_lightning.privacy.digests import state_digest
from lipdp_lightning.privacy.grid import grid_shift

SECRET = bytes(range(16))
DIGEST = b"d" * 32
COUNT = 60_000
SIZES = [COUNT, COUNT]
DEVIATIONS = [0.5, 3.0]

# (step, rank, world_size, digest) -> one flat buffer of SIZES with DEVIATIONS
Draw = Callable[[int, int, int, bytes], Tensor]


def drawn(
    step: int,
    place: Place,
    digest: bytes,
    sizes: Sequence[int] = SIZES,
    deviations: Sequence[float] = DEVIATIONS,
    secret: bytes = SECRET,
    secure: bool = False,
) -> Tensor:
    """Returns what a process adds to sums of zero, before it is rounded to the grid."""
    sums = [Sum(torch.zeros(size, dtype=torch.float64), d) for size, d in zip(sizes, deviations, strict=True)]
    release_(sums, StepNoise.of(secret, step, place, digest, secure, grid=False))
    return torch.cat([one.values for one in sums])


def correct(step: int, rank: int, world_size: int, digest: bytes) -> Tensor:
    return drawn(step, Place(rank, world_size), digest)


def secure(step: int, rank: int, world_size: int, digest: bytes) -> Tensor:
    return drawn(step, Place(rank, world_size), digest, secure=True)


def same_seed_on_all_ranks(step: int, rank: int, world_size: int, digest: bytes) -> Tensor:
    return drawn(step, Place(0, world_size), digest)


def divided_by_the_world_size(step: int, rank: int, world_size: int, digest: bytes) -> Tensor:
    return correct(step, rank, world_size, digest) / math.sqrt(world_size)


def undivided(step: int, rank: int, world_size: int, digest: bytes) -> Tensor:
    return correct(step, rank, world_size, digest) * math.sqrt(world_size)


def on_rank_zero_only(step: int, rank: int, world_size: int, digest: bytes) -> Tensor:
    return undivided(step, rank, world_size, digest) * (rank == 0)


def shared_by_the_groups(step: int, rank: int, world_size: int, digest: bytes) -> Tensor:
    noise = correct(step, rank, world_size, digest)
    return torch.cat([noise[:COUNT], noise[:COUNT] * DEVIATIONS[1] / DEVIATIONS[0]])


def same_at_every_step(step: int, rank: int, world_size: int, digest: bytes) -> Tensor:
    return correct(0, rank, world_size, digest)


def one_draw_added_four_times(step: int, rank: int, world_size: int, digest: bytes) -> Tensor:
    return correct(step, rank, world_size, digest) * 4 / 2


def without_the_digest(step: int, rank: int, world_size: int, digest: bytes) -> Tensor:
    return correct(step, rank, world_size, b"-" * 32)


def is_normal(sample: Tensor, deviation: float) -> bool:
    variance_error = sample.var().item() / deviation**2 - 1
    matches = stats.kstest(sample.numpy() / deviation, "norm").pvalue > 1e-4
    return matches and abs(variance_error) < 4 * math.sqrt(2 / sample.numel())


def uncorrelated(first: Tensor, second: Tensor) -> bool:
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1].item()
    return abs(correlation) < 4 / math.sqrt(first.numel())  # a constant gives NaN, which is no pass


def sums_to_the_full_variance(draw: Draw, world_size: int) -> bool:
    """No rank holds less than its share, and the sum over ranks is the noise the accountant was promised."""
    parts = [draw(3, rank, world_size, DIGEST) for rank in range(world_size)]
    sums = torch.stack(parts).sum(0).split(SIZES)
    shares = all(
        is_normal(segment, deviation / math.sqrt(world_size))
        for part in parts
        for segment, deviation in zip(part.split(SIZES), DEVIATIONS, strict=True)
    )
    return shares and all(is_normal(s, deviation) for s, deviation in zip(sums, DEVIATIONS, strict=True))


def is_independent(draw: Draw) -> bool:
    """Between groups, steps, ranks, world sizes and states."""
    base = draw(3, 1, 2, DIGEST)
    others = [draw(4, 1, 2, DIGEST), draw(3, 0, 2, DIGEST), draw(3, 1, 4, DIGEST), draw(3, 1, 2, b"e" * 32)]
    return uncorrelated(*base.split(SIZES)) and all(uncorrelated(base, other) for other in others)


@pytest.mark.parametrize("draw", [correct, secure])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_noise_summed_over_ranks_has_the_full_variance(draw: Draw, world_size: int) -> None:
    assert sums_to_the_full_variance(draw, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("draw", [same_seed_on_all_ranks, divided_by_the_world_size, undivided, on_rank_zero_only])
def test_broken_splits_over_ranks_fail_the_variance_check(draw: Draw, world_size: int) -> None:
    assert not sums_to_the_full_variance(draw, world_size)


def test_four_copies_of_one_draw_fail_the_variance_check() -> None:
    assert not sums_to_the_full_variance(one_draw_added_four_times, 1)


@pytest.mark.parametrize("draw", [correct, secure])
def test_noise_is_independent_between_groups_steps_ranks_and_states(draw: Draw) -> None:
    assert is_independent(draw)


@pytest.mark.parametrize("draw", [same_seed_on_all_ranks, shared_by_the_groups, same_at_every_step, without_the_digest])
def test_shared_noise_fails_the_independence_check(draw: Draw) -> None:
    assert not is_independent(draw)


def test_replicated_noise_is_the_same_on_every_rank_with_the_full_deviation() -> None:
    draws = [drawn(3, Place(rank, 4, "replicated"), DIGEST) for rank in range(4)]
    assert all(torch.equal(draws[0], draw) for draw in draws)
    for segment, deviation in zip(draws[0].split(SIZES), DEVIATIONS, strict=True):
        assert is_normal(segment, deviation)
    assert all(uncorrelated(draws[0], correct(3, rank, 4, DIGEST)) for rank in range(4))


def test_same_state_repeats_the_same_bits() -> None:
    sizes, deviations = [3, 70_001, 0, 12], [1.0, 0.1, 2.0, 0.0]
    for is_secure in (False, True):
        draws = [drawn(5, Place(1, 2), DIGEST, sizes, deviations, secure=is_secure) for _ in range(3)]
        assert all(torch.equal(draws[0], draw) for draw in draws)
        assert draws[0].numel() == sum(sizes) and draws[0][-12:].abs().max() == 0


def test_secret_and_secure_flag_change_the_noise() -> None:
    base = correct(3, 0, 1, DIGEST)
    assert uncorrelated(base, secure(3, 0, 1, DIGEST))
    assert uncorrelated(base, drawn(3, Place(), DIGEST, secret=bytes(16)))


def test_secure_noise_is_the_halved_sum_of_four_draws() -> None:
    noise = StepNoise.of(SECRET, 0, Place(), DIGEST, secure=True)
    parts = [normals(noise.key, 4 * 2 + sample, 0, COUNT) for sample in range(4)]
    drawn = normals(noise.key, noise.stream(2), 0, COUNT, noise.samples)
    assert torch.equal(drawn, (parts[0] + parts[1] + parts[2] + parts[3]) / 2)
    assert all(uncorrelated(parts[i], parts[j]) for i in range(4) for j in range(i))


def keyed_by_counter(key: bytes) -> Tensor:
    return normals(key, StepNoise(key).stream(0), 0, 10_000)


def keyed_by_torch_generator(key: bytes) -> Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(key[-8:], "big") >> 1)
    return torch.randn(10_000, dtype=torch.float64, generator=generator)


def every_key_bit_counts(draw: Callable[[bytes], Tensor]) -> bool:
    """Keys that differ in any one bit give unrelated noise."""
    base = bytes(range(32))
    reference = draw(base)
    for bit in range(256):
        changed = (int.from_bytes(base, "big") ^ (1 << bit)).to_bytes(32, "big")
        if not uncorrelated(reference, draw(changed)):
            return False
    return True


def test_keys_are_used_in_full_unlike_seeds_of_32_bits() -> None:
    assert every_key_bit_counts(keyed_by_counter)
    assert not every_key_bit_counts(keyed_by_torch_generator)
    # the reason: torch's CPU generator repeats itself for seeds equal modulo 2^32
    first, second = (torch.Generator().manual_seed(7 + offset) for offset in (0, 1 << 32))
    assert torch.equal(torch.randn(10, generator=first), torch.randn(10, generator=second))


def releases_after_resume(draw: Draw, learning_rate: float) -> list[tuple[Tensor, Tensor]]:
    """Two steps of noisy gradient descent from one checkpoint: (true sum, released sum) of each."""
    weights = torch.linspace(-1, 1, 2 * COUNT, dtype=torch.float64)
    history = []
    for step in (10, 11):
        true_sum = torch.sin(3 * weights) + weights  # stands for a sum over private examples
        digest = state_digest({"weights": weights}, b"plan", b"data")
        released = true_sum + draw(step, 0, 1, digest)
        history.append((true_sum, released))
        weights = weights - learning_rate * released
    return history


def resume_is_free_or_fresh(draw: Draw) -> bool:
    """One checkpoint, two learning rates: the step from the same state releases the same bits, and the next,
    whose state differs, must not publish the difference of two true sums."""
    (_, first), (true_sum, released) = releases_after_resume(draw, 0.1)
    (_, first_again), (other_sum, other_released) = releases_after_resume(draw, 0.2)
    residual = (released - other_released) - (true_sum - other_sum)
    protected = all(
        is_normal(segment, deviation * math.sqrt(2))
        for segment, deviation in zip(residual.split(SIZES), DEVIATIONS, strict=True)
    )
    return torch.equal(first, first_again) and protected


def test_changed_resume_draws_fresh_noise() -> None:
    assert resume_is_free_or_fresh(correct)


def test_replay_without_the_digest_fails_the_resume_check() -> None:
    assert not resume_is_free_or_fresh(without_the_digest)
    (_, _), (true_sum, released) = releases_after_resume(without_the_digest, 0.1)
    (_, _), (other_sum, other_released) = releases_after_resume(without_the_digest, 0.2)
    assert (true_sum - other_sum).abs().mean() > 0.01
    assert ((released - other_released) - (true_sum - other_sum)).abs().max() < 1e-13


# ---- the release


SHAPES: list[tuple[int, ...]] = [(300, 301), (1,), (0,), (64, 3, 5, 5), (PIECE + 1,), (0, 3), (33, 100), (17,)]


def sums_of(seed: int, with_apart: bool) -> list[Sum]:
    """Sums of both dtypes, one in another layout, some with a further part, one without noise."""
    torch.manual_seed(seed)
    found = []
    for index, shape in enumerate(SHAPES):
        values = torch.randn(shape, dtype=torch.float64 if (index + seed) % 3 == 0 else torch.float32)
        if len(shape) == 4:
            values = values.contiguous(memory_format=torch.channels_last)
        apart = torch.randn(shape, dtype=torch.float64) if with_apart and index % 2 == 0 else None
        found.append(Sum(values, [0.5, 0.0, 1.0, 2.0][index % 4], 1 / 3, 57.0, apart))
    return found


def formula(one: Sum, noise: StepNoise, number: int) -> np.ndarray[Any, Any]:
    """Every product, sum and quotient rounded by itself, in float64, sums to their grid, and then to their dtype."""
    total = one.values.reshape(-1).numpy().astype(np.float64)
    if one.apart is not None:
        total = total + one.apart.reshape(-1).numpy()
    drawn = normals(noise.key, noise.stream(number), 0, len(total), noise.samples)
    added = drawn.numpy() * one.deviation
    shift = grid_shift(one.deviation)
    noisy = ((total * one.share + added) + shift) - shift
    return (noisy * (1.0 / one.divisor)).astype(one.values.reshape(-1).numpy().dtype)


def has_the_bits_of_the_formula(
    release: Callable[..., None], seed: int = 0, with_apart: bool = False, secure: bool = False
) -> bool:
    noise = StepNoise.of(SECRET, 3, Place(), DIGEST, secure)
    expected = [formula(one, noise, number) for number, one in enumerate(sums_of(seed, with_apart))]
    sums = sums_of(seed, with_apart)
    release(sums, noise)
    assert [one.values.stride() for one in sums] == [one.values.stride() for one in sums_of(seed, with_apart)]
    found = [one.values.reshape(-1).numpy() for one in sums]
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("with_apart", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_release_has_the_bits_of_the_formula(seed: int, with_apart: bool, secure: bool) -> None:
    assert has_the_bits_of_the_formula(release_, seed, with_apart, secure)


@pytest.mark.parametrize("mode", ["distributed", "replicated"])
def test_a_release_over_processes_has_the_bits_of_one_process(mode: Mode) -> None:
    """With one process behind the reduction."""

    def through_a_reduction(sums: list[Sum], noise: StepNoise) -> None:
        release_(sums, noise, reduce=lambda total: None, replicated=mode == "replicated")

    assert has_the_bits_of_the_formula(through_a_reduction, with_apart=True)


def test_noise_is_added_before_the_reduction_unless_it_is_replicated() -> None:
    def reduced(replicated: bool) -> Tensor:
        seen: list[Tensor] = []
        noise = StepNoise.of(SECRET, 3, Place(), DIGEST)
        release_([Sum(torch.zeros(100), 1.0)], noise, lambda total: seen.append(total.clone()), replicated)
        return seen[0]

    assert reduced(False).abs().min() > 0 and reduced(True).abs().max() == 0


def broken_noise(change: Callable[..., Tensor]) -> Callable[[list[Sum], StepNoise], None]:
    def release(sums: list[Sum], noise: StepNoise) -> None:
        with drawn_otherwise(change):
            release_(sums, noise)

    return release


BROKEN: dict[str, Callable[[list[Sum], StepNoise], None]] = {
    "every piece begins at the first position": broken_noise(lambda draw, n, start, count: draw(n, 0, count)),
    "one stream for all parameters": broken_noise(lambda draw, n, start, count: draw(0, start, count)),
    "noise in float32": broken_noise(lambda draw, n, start, count: draw(n, start, count).float().double()),
    "deviation of the next sum": lambda sums, noise: release_(
        [replace(a, deviation=b.deviation) for a, b in zip(sums, [*sums[1:], sums[0]], strict=True)], noise
    ),
    "no grid": lambda sums, noise: release_(sums, replace(noise, grid=False)),
    "no sums apart": lambda sums, noise: release_([replace(one, apart=None) for one in sums], noise),
    "the last sum is forgotten": lambda sums, noise: release_(sums[:-1], noise),
    "a sum is released twice": lambda sums, noise: (release_(sums, noise), release_(sums[:1], noise))[0],
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_release_fails_the_same_check(name: str) -> None:
    assert not has_the_bits_of_the_formula(BROKEN[name], with_apart=True)


def test_every_entry_has_one_draw_of_its_own() -> None:
    values = drawn(0, Place(), DIGEST, [70_001, 1, 0, 199_998], [1.0] * 4)
    assert len(torch.unique(values)) == len(values) == 270_000
    assert abs(values.std().item() - 1) < 0.01


def test_pieces_are_drawn_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing as long as a large parameter is ever allocated beside it."""
    asked: list[tuple[int, int]] = []

    def recorded(key: bytes, stream: int, start: int, count: int, samples: int) -> Tensor:
        asked.append((start, count))
        return normals(key, stream, start, count, samples)

    monkeypatch.setattr(normals_module, "normals", recorded)
    release_([Sum(torch.zeros(5 * PIECE + 3), 1.0)], StepNoise.of(SECRET, 0, Place(), DIGEST))
    assert asked == [(PIECE * i, PIECE) for i in range(5)] + [(5 * PIECE, 3)]


def test_bad_requests_are_refused_with_everything_wrong_at_once() -> None:
    with pytest.raises(ValueError) as refusal:
        StepNoise.of(SECRET, -1, Place(2, 2, "rank0"), b"")  # type: ignore[arg-type]
    for part in ("step", "rank is 2", "'rank0'", "digest has 0 bytes", "HINT"):
        assert part in str(refusal.value)
    with pytest.raises(ValueError, match="HINT"):
        StepNoise.of(b"guess", 0, Place(), DIGEST)


@pytest.mark.parametrize("deviation", [math.nan, math.inf, -1.0])
def test_noise_that_cannot_be_scaled_is_refused_before_any_is_added(deviation: float) -> None:
    sums = [Sum(torch.ones(3), 1.0), Sum(torch.ones(3), deviation)]
    with pytest.raises(ValueError, match="HINT"):
        release_(sums, StepNoise.of(SECRET, 0, Place(), DIGEST))
    assert all(torch.equal(one.values, torch.ones(3)) for one in sums)


def test_secret_is_not_shown() -> None:
    shown = repr(StepNoise.of(SECRET, 0, Place(), DIGEST))
    assert SECRET.hex() not in shown and str(SECRET) not in shown
