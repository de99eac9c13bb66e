"""Poisson samples and keyed splits; each check is also shown to reject a sampler that breaks it."""

import ast
import gc
import math
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from private_step import make_plan
from scipy import stats

from lipdp_lightning.key_streams import CounterStream
from lipdp_lightning.privacy import sampling
from lipdp_lightning.privacy.keys import derive_key, new_secret
from lipdp_lightning.privacy.sampling import SampleCiphers, local_slice, poisson_sample
from lipdp_lightning.training.batches import planned_draws

SECRET = b"a fixed secret.."
OTHER = b"another secret.."


def draws(sampler, steps, size, rate, secret=SECRET):
    return [sampler(secret, step, size, rate) for step in range(steps)]


def counts_are_binomial(samples, size, rate):
    """p-value of a chi-square test of the sample sizes against Binomial(size, rate)."""
    counts = np.array([len(s) for s in samples])
    edges = stats.binom.ppf(np.linspace(0, 1, 9)[1:-1], size, rate)
    edges = np.unique(edges)
    cdf = np.concatenate([[0], stats.binom.cdf(edges, size, rate), [1]])
    observed = np.bincount(np.searchsorted(edges, counts, side="left"), minlength=len(edges) + 1)
    return stats.chisquare(observed, np.diff(cdf) * len(counts)).pvalue


def overlaps_are_binomial(samples, size, rate):
    """p-value: indices common to consecutive steps against independent draws."""
    common = sum(len(np.intersect1d(a, b)) for a, b in zip(samples[::2], samples[1::2], strict=True))
    return stats.binomtest(common, size * (len(samples) // 2), rate**2).pvalue


def empties_are_binomial(samples, size, rate):
    empties = sum(len(s) == 0 for s in samples)
    return stats.binomtest(empties, len(samples), (1 - rate) ** size).pvalue


def test_sample_sizes_are_binomial():
    assert counts_are_binomial(draws(poisson_sample, 2000, 500, 0.1), 500, 0.1) > 1e-3


def test_fixed_size_batches_are_rejected():
    def fixed(secret, step, size, rate):
        return np.random.default_rng(step).permutation(size)[: int(size * rate)]

    assert counts_are_binomial(draws(fixed, 2000, 500, 0.1), 500, 0.1) < 1e-6


def test_every_index_is_drawn_at_the_rate():
    samples = draws(poisson_sample, 3000, 200, 0.05)
    hits = np.bincount(torch.cat(samples).numpy(), minlength=200)
    statistic = ((hits - 150) ** 2).sum() / (3000 * 0.05 * 0.95)
    assert 1e-3 < stats.chi2.sf(statistic, 200) < 1 - 1e-3
    assert abs(hits.sum() / (3000 * 200) - 0.05) < 4 * math.sqrt(0.05 * 0.95 / 600_000)


def test_neighbouring_indices_are_independent():
    samples = draws(poisson_sample, 3000, 100, 0.2)
    masks = np.zeros((3000, 100), dtype=bool)
    for row, sample in zip(masks, samples, strict=True):
        row[sample.numpy()] = True
    both = (masks[:, :-1:2] & masks[:, 1::2]).sum()
    assert stats.binomtest(int(both), 3000 * 50, 0.04).pvalue > 1e-3


def test_steps_are_independent():
    assert overlaps_are_binomial(draws(poisson_sample, 600, 1000, 0.1), 1000, 0.1) > 1e-3


def test_a_sampler_that_ignores_the_step_is_rejected():
    def stuck(secret, step, size, rate):
        return poisson_sample(secret, 0, size, rate)

    assert overlaps_are_binomial(draws(stuck, 600, 1000, 0.1), 1000, 0.1) < 1e-6


def test_a_shuffled_epoch_is_rejected():
    def epoch(secret, step, size, rate):
        per_epoch = round(1 / rate)
        order = np.random.default_rng(step // per_epoch).permutation(size)
        return order[step % per_epoch :: per_epoch]

    assert overlaps_are_binomial(draws(epoch, 600, 1000, 0.1), 1000, 0.1) < 1e-6


def test_empty_samples_occur_as_often_as_they_should():
    assert empties_are_binomial(draws(poisson_sample, 3000, 10, 0.05), 10, 0.05) > 1e-3


def test_resampling_empty_samples_is_rejected():
    def resampling(secret, step, size, rate):
        attempt = step
        while len(sample := poisson_sample(secret, attempt, size, rate)) == 0:
            attempt += 1_000_000
        return sample

    assert empties_are_binomial(draws(resampling, 3000, 10, 0.05), 10, 0.05) < 1e-6


def test_pure_in_secret_and_step_and_sensitive_to_both():
    first = poisson_sample(SECRET, 7, 10_000, 0.01)
    torch.manual_seed(3)
    assert torch.equal(first, poisson_sample(SECRET, 7, 10_000, 0.01))
    assert not torch.equal(first, poisson_sample(SECRET, 8, 10_000, 0.01))
    assert not torch.equal(first, poisson_sample(OTHER, 7, 10_000, 0.01))


def test_sorted_unique_int64_in_range():
    sample = poisson_sample(SECRET, 0, 5000, 0.3)
    assert sample.dtype == torch.int64
    assert (sample.diff() > 0).all() and sample[0] >= 0 and sample[-1] < 5000


def test_removing_the_last_record_moves_no_other():
    assert torch.equal(poisson_sample(SECRET, 4, 999, 0.2), (full := poisson_sample(SECRET, 4, 1000, 0.2))[full < 999])


def test_rate_one_is_everything_and_just_below_is_not_an_error():
    assert torch.equal(poisson_sample(SECRET, 0, 100, 1.0), torch.arange(100))
    assert len(poisson_sample(SECRET, 0, 1000, math.nextafter(1.0, 0.0))) == 1000


def no_noise(cipher, step, start, count):
    """Every word is the smallest: selected whenever the threshold is positive."""
    return np.zeros(count, dtype=np.uint32)


def test_threshold_rounds_down(monkeypatch):
    monkeypatch.setattr(sampling, "_words", no_noise)
    assert len(poisson_sample(SECRET, 0, 10, 0.5 * 2.0**-64)) == 0  # rounding up would select all ten
    assert len(poisson_sample(SECRET, 0, 10, 2.0**-64)) == 10


def all_undecided(upper):
    """The words of a sample equal the upper half of the threshold; their lower halves are drawn as ever."""
    drawn, ciphers = sampling._words, SampleCiphers(SECRET)

    def words(cipher, step, start, count):
        first = cipher is ciphers.upper
        return np.full(count, upper, dtype=np.uint32) if first else drawn(cipher, step, start, count)

    return words, ciphers


@pytest.mark.parametrize("share", [0.0, 0.25, 0.9])
@pytest.mark.parametrize("upper", [0, 5, 2**32 - 1])
def test_what_the_upper_halves_leave_open_the_lower_ones_decide_at_the_rate(monkeypatch, upper, share):
    rate = (upper + share) / 2**32
    if rate == 0:
        return
    words, ciphers = all_undecided(upper)
    monkeypatch.setattr(sampling, "_words", words)
    sample = poisson_sample(ciphers, 3, 20_000, rate)
    threshold = math.floor(Fraction(rate) * 2**64) % 2**32 / 2**32  # of what the float keeps of the rate
    assert stats.binomtest(len(sample), 20_000, threshold).pvalue > 1e-3


def test_a_sampler_that_leaves_ties_out_is_rejected(monkeypatch):
    monkeypatch.setattr(sampling, "_words", no_noise)
    assert len(poisson_sample(SECRET, 0, 10, 2.0**-33)) == 10
    words = [np.full(10, value, np.uint32) for value in (2**32 - 1, 0)]
    monkeypatch.setattr(sampling, "_words", lambda *_: words.pop())
    assert len(poisson_sample(SECRET, 0, 10, 2.0**-33)) == 0


def test_the_words_are_those_of_aes_in_counter_mode():
    """No two steps or blocks share a word, and who has the secret can draw them by other means."""
    rate, size = 0.3, 3 * sampling._BLOCK // 2
    threshold, key = math.floor(Fraction(rate) * 2**64) >> 32, derive_key(SECRET, "sampling")
    for step in (0, 7, 2**40):
        expected = []
        for block, count in enumerate((sampling._BLOCK, size - sampling._BLOCK)):
            counter = step.to_bytes(8, "big") + block.to_bytes(4, "big") + (2).to_bytes(4, "big")
            stream = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor().update(bytes(4 * count))
            words = np.frombuffer(stream, dtype="<u4")
            expected.append((words < threshold).nonzero()[0] + block * sampling._BLOCK)
        assert np.array_equal(poisson_sample(SECRET, step, size, rate).numpy(), np.concatenate(expected))


def test_nothing_that_outlives_a_run_holds_its_secret():
    """A cache keyed by the secret keeps it in the process after the run, for whatever dumps or pickles the module."""
    secret = new_secret()
    before = sys.getrefcount(secret)
    draw = planned_draws(secret, make_plan(), 1000, 0, 1, 1)
    assert torch.equal(draw(2, 0), poisson_sample(secret, 2, 1000, make_plan().sample_rate))
    noise = CounterStream(derive_key(secret, "noise")).normal(4)
    assert torch.equal(noise, CounterStream(derive_key(secret, "noise")).normal(4))
    del draw
    gc.collect()
    assert sys.getrefcount(secret) == before


def test_no_cache_of_a_module_takes_a_secret():
    """The arguments of a cached function stay in memory as long as the process."""
    found = []
    for path in sorted(Path(sampling.__file__).parents[1].rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            cached = any("cache" in ast.unparse(decorator) for decorator in node.decorator_list)
            names = {a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]}
            if cached and any(word in name for name in names for word in ("secret", "key", "cipher")):
                found.append(f"{path.name}: {node.name}")
    assert not found


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, math.nan])
def test_bad_rates_are_refused(rate):
    with pytest.raises(ValueError, match="HINT"):
        poisson_sample(SECRET, 0, 10, rate)


def slices_are_a_partition(slicer, sample, world_size, chunks):
    """Each index exactly once over all ranks and chunks."""
    parts = [slicer(sample, r, world_size, c, chunks) for r in range(world_size) for c in range(chunks)]
    return sorted(torch.cat(parts).tolist()) == sample.tolist()


@settings(deadline=None, max_examples=200)
@given(size=st.integers(0, 60), world_size=st.integers(1, 7), chunks=st.integers(1, 5), start=st.integers(0, 1000))
def test_local_slices_partition_and_are_balanced(size, world_size, chunks, start):
    sample = torch.arange(start, start + 3 * size, 3)
    assert slices_are_a_partition(local_slice, sample, world_size, chunks)
    sizes = [[len(local_slice(sample, r, world_size, c, chunks)) for c in range(chunks)] for r in range(world_size)]
    flat = [n for row in sizes for n in row]
    assert max(flat) - min(flat) <= 1
    per_rank = [sum(row) for row in sizes]
    assert max(per_rank) - min(per_rank) <= 1


def test_per_rank_same_mask_is_rejected():
    sample = poisson_sample(SECRET, 0, 200, 0.3)
    assert not slices_are_a_partition(lambda s, r, w, c, k: local_slice(s, 0, w, c, k), sample, 2, 1)


def test_per_rank_independent_sampling_is_rejected():
    own = [poisson_sample(bytes([65 + r]) * 16, 0, 200, 0.3) for r in range(2)]
    assert not slices_are_a_partition(lambda s, r, w, c, k: own[r], own[0], 2, 1)


def micro_batches(slicer_loop, sample, world_size, chunks):
    return {len(slicer_loop(sample, rank, world_size, chunks)) for rank in range(world_size)}


def test_every_rank_runs_every_chunk_even_empty_ones():
    def all_of_them(sample, rank, world_size, chunks):
        return [local_slice(sample, rank, world_size, c, chunks) for c in range(chunks)]

    def drops_empty(sample, rank, world_size, chunks):
        return [part for part in all_of_them(sample, rank, world_size, chunks) if len(part)]

    sample = torch.tensor([5])
    assert micro_batches(all_of_them, sample, 3, 2) == {2}
    assert micro_batches(drops_empty, sample, 3, 2) != {2}  # ranks would wait for each other for ever


@pytest.mark.parametrize("share", [(2, 2, 0, 1), (-1, 2, 0, 1), (0, 1, 1, 1), (0, 0, 0, 1)])
def test_shares_that_do_not_exist_are_refused(share):
    rank, world_size, chunk, chunks = share
    with pytest.raises(ValueError, match="HINT"):
        local_slice(torch.arange(4), rank, world_size, chunk, chunks)
