"""The noise of a step: lipdp_lightning/mechanism/noise.py, and what a check of it must catch."""

import math
import threading
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor

from lipdp_lightning.mechanism.noise import NoisePrefetcher, NoiseSource, gaussian
from lipdp_lightning.privacy.randomness import CounterStream, derive_key, state_digest

SECRET = bytes(range(16))
DIGEST = b"d" * 32
COUNT = 60_000
SIZES = [COUNT, COUNT]
DEVIATIONS = [0.5, 3.0]

# (step, rank, world_size, digest) -> one flat buffer of SIZES with DEVIATIONS
Draw = Callable[[int, int, int, bytes], Tensor]


def correct(step: int, rank: int, world_size: int, digest: bytes) -> Tensor:
    return NoiseSource(SECRET).draw(step, SIZES, rank, world_size, "distributed", digest, DEVIATIONS)


def secure(step: int, rank: int, world_size: int, digest: bytes) -> Tensor:
    source = NoiseSource(SECRET, secure=True)
    return source.draw(step, SIZES, rank, world_size, "distributed", digest, DEVIATIONS)


def same_seed_on_all_ranks(step: int, rank: int, world_size: int, digest: bytes) -> Tensor:
    return NoiseSource(SECRET).draw(step, SIZES, 0, world_size, "distributed", digest, DEVIATIONS)


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
    draws = [NoiseSource(SECRET).draw(3, SIZES, rank, 4, "replicated", DIGEST, DEVIATIONS) for rank in range(4)]
    assert all(torch.equal(draws[0], draw) for draw in draws)
    for segment, deviation in zip(draws[0].split(SIZES), DEVIATIONS, strict=True):
        assert is_normal(segment, deviation)
    assert all(uncorrelated(draws[0], correct(3, rank, 4, DIGEST)) for rank in range(4))


def test_same_state_repeats_the_same_bits_whatever_the_threads() -> None:
    sizes = [3, 70_001, 0, 12]
    deviations = [1.0, 0.1, 2.0, 0.0]
    for is_secure in (False, True):
        draws = [
            NoiseSource(SECRET, secure=is_secure, threads=threads).draw(
                5, sizes, 1, 2, "distributed", DIGEST, deviations
            )
            for threads in (1, 2, 5)
        ]
        assert all(torch.equal(draws[0], draw) for draw in draws)
        assert draws[0].dtype == torch.float64 and draws[0].numel() == sum(sizes)
        assert draws[0][-12:].abs().max() == 0


def test_secret_sizes_and_secure_flag_change_the_noise() -> None:
    base = correct(3, 0, 1, DIGEST)
    assert uncorrelated(base, secure(3, 0, 1, DIGEST))
    other = NoiseSource(bytes(16)).draw(3, SIZES, 0, 1, "distributed", DIGEST, DEVIATIONS)
    assert uncorrelated(base, other)
    merged = NoiseSource(SECRET).draw(3, [2 * COUNT], 0, 1, "distributed", DIGEST, [1.0])
    assert uncorrelated(base, merged)


def test_secure_noise_is_the_halved_sum_of_four_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []

    def recorded(key: bytes, count: int, threads: int) -> Tensor:
        parts.append(gaussian(key, count, threads))
        return parts[-1].clone()

    monkeypatch.setattr("lipdp_lightning.mechanism.noise.gaussian", recorded)
    noise = NoiseSource(SECRET, secure=True).draw(0, [COUNT], 0, 1, "distributed", DIGEST, [1.0])
    assert len(parts) == 4 and torch.equal(noise, (parts[0] + parts[1] + parts[2] + parts[3]) / 2)
    assert all(uncorrelated(parts[i], parts[j]) for i in range(4) for j in range(i))


def keyed_by_counter(key: bytes) -> Tensor:
    return gaussian(key, 10_000)


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


def test_gaussian_is_the_stream_of_its_key_in_float64() -> None:
    key = derive_key(SECRET, "noise", 1)
    assert torch.equal(gaussian(key, 40_000, threads=3), CounterStream(key).normal(40_000))
    assert gaussian(key, 7).dtype == torch.float64


def test_bad_requests_are_refused_with_everything_wrong_at_once() -> None:
    source = NoiseSource(SECRET)
    with pytest.raises(ValueError) as refusal:
        source.draw(-1, [3, -2], 2, 2, "rank0", b"", [1.0, 1.0])  # type: ignore[arg-type]
    for part in ("step", "sizes", "rank is 2", "'rank0'", "digest has 0 bytes", "HINT"):
        assert part in str(refusal.value)
    for deviations in ([1.0], [1.0, math.nan], [1.0, math.inf], [-1.0, 1.0]):
        with pytest.raises(ValueError, match="HINT"):
            source.draw(0, [3, 2], 0, 1, "distributed", DIGEST, deviations)
    with pytest.raises(ValueError, match="HINT"):
        NoiseSource(b"guess")


def test_secret_is_not_shown() -> None:
    assert SECRET.hex() not in repr(NoiseSource(SECRET)) and str(SECRET) not in repr(NoiseSource(SECRET))


def noise_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("noise")}


@pytest.mark.parametrize("mode", ["distributed", "replicated"])
def test_prefetched_noise_equals_the_draw(mode: str) -> None:
    source, before = NoiseSource(SECRET), noise_threads()
    with NoisePrefetcher(source) as prefetcher:
        for step in range(3):
            state = state_digest({"weights": torch.full((3,), float(step))})
            digest = state if step % 2 else lambda state=state: state
            prefetcher.start(step, SIZES, 1, 2, mode, digest)
            expected = source.draw(step, SIZES, 1, 2, mode, state, DEVIATIONS)
            assert torch.equal(prefetcher.take(step, DEVIATIONS), expected)
    assert noise_threads() <= before


def test_prefetcher_drops_a_draw_nobody_took_and_refuses_another_step() -> None:
    with NoisePrefetcher(NoiseSource(SECRET)) as prefetcher:
        prefetcher.start(0, SIZES, 0, 1, "distributed", DIGEST)
        prefetcher.start(1, SIZES, 0, 1, "distributed", DIGEST)
        with pytest.raises(AssertionError):
            prefetcher.take(0, DEVIATIONS)
        assert torch.equal(prefetcher.take(1, DEVIATIONS), correct(1, 0, 1, DIGEST))
        with pytest.raises(AssertionError):
            prefetcher.take(1, DEVIATIONS)  # taken once: never the same noise twice


def test_prefetcher_passes_exceptions_on_and_leaves_no_thread() -> None:
    def fail() -> bytes:
        raise RuntimeError("weights are gone")

    before = noise_threads()
    prefetcher = NoisePrefetcher(NoiseSource(SECRET))
    prefetcher.start(0, SIZES, 0, 1, "distributed", fail)
    with pytest.raises(RuntimeError, match="weights are gone"):
        prefetcher.take(0, DEVIATIONS)
    prefetcher.start(1, SIZES, 3, 1, "distributed", DIGEST)
    with pytest.raises(ValueError, match="rank is 3"):
        prefetcher.take(1, DEVIATIONS)
    prefetcher.start(2, SIZES, 0, 1, "distributed", DIGEST)
    assert noise_threads() - before
    prefetcher.close()
    prefetcher.close()
    assert noise_threads() <= before
