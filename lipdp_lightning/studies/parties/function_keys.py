"""Makes two keys that share a function, f(x) = beta 1[x < alpha] or f(x) = beta 1[x = alpha], with values modulo 2^64.

Boyle, Gilboa and Ishai (2016, and with Chandran, Gupta, Kumar and Rathee 2021 for the comparison): a binary tree of
pseudo-random seeds. On the path to alpha the two keys' seeds are independent and their control bits differ; off it the
seeds and bits are equal, so that what the two add there cancels. Correction words, the same in both keys, make the
seeds equal where a path leaves alpha's. One key is a root seed that is uniform and correction words that are masked by
the other key's seeds: pseudo-random bytes, whatever alpha and beta are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lipdp_lightning.key_streams import CounterStream
from lipdp_lightning.studies.parties.ggm import ONE, SEED_MASK, FixedKeyGenerator

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
_CHUNK = 1 << 13  # keys evaluated at a time, whose seeds fit into the cache


@dataclass(frozen=True)
class KeyBatch:
    """One server's keys of many parties.

    Attributes:
        roots: the seeds, (n, 2); the lowest bit means nothing.
        seeds: the corrections, (levels, n, 2); the lowest bit is the control bit's correction on the left.
        right: the control bit's correction on the right, 0 or 1, (levels, n).
        values: the corrections of the values, (levels, n); None for point functions.
        final: the correction of the leaf, (n,).
    """

    roots: Words
    seeds: Words
    right: Words
    values: Words | None
    final: Words

    @property
    def levels(self) -> int:
        return int(self.seeds.shape[0])

    def __len__(self) -> int:
        return int(self.roots.shape[0])

    def part(self, start: int, stop: int) -> KeyBatch:
        values = None if self.values is None else self.values[:, start:stop]
        cut = slice(start, stop)
        return KeyBatch(self.roots[cut], self.seeds[:, cut], self.right[:, cut], values, self.final[cut])


def key_bytes(levels: int, comparison: bool) -> int:
    """Returns the length of a key, which depends on nothing else."""
    return 16 + 8 + levels * (24 if comparison else 16) + (levels + 7) // 8


def to_bytes(keys: KeyBatch) -> Bytes:
    """Returns the keys as (n, key_bytes), a key per row."""
    count = len(keys)
    words = [keys.roots, keys.final[:, None], keys.seeds.transpose(1, 0, 2).reshape(count, -1)]
    if keys.values is not None:
        words.append(keys.values.T)
    rows = np.ascontiguousarray(np.concatenate(words, axis=1), dtype="<u8").view(np.uint8)
    bits = np.packbits(keys.right.T.astype(np.uint8), axis=1, bitorder="little")
    return np.concatenate([rows.reshape(count, -1), bits], axis=1)


def from_bytes(rows: Bytes, levels: int, comparison: bool) -> KeyBatch:
    """Inverts `to_bytes`."""
    if rows.ndim != 2 or rows.shape[1] != key_bytes(levels, comparison):
        raise ValueError(
            f"keys of shape {rows.shape} are not of {key_bytes(levels, comparison)} bytes each.\n"
            "HINT: parties and servers must agree on the number of levels and on the kind of function."
        )
    cut = rows.shape[1] - (levels + 7) // 8
    words = np.ascontiguousarray(rows[:, :cut]).view("<u8").astype(np.uint64)
    seeds = words[:, 3 : 3 + 2 * levels].reshape(-1, levels, 2).transpose(1, 0, 2)
    bits = np.unpackbits(rows[:, cut:], axis=1, count=levels, bitorder="little").T.astype(np.uint64)
    values = np.ascontiguousarray(words[:, 3 + 2 * levels :].T) if comparison else None
    return KeyBatch(words[:, :2].copy(), np.ascontiguousarray(seeds), np.ascontiguousarray(bits), values, words[:, 2])


def _choose(bits: Words, if_one: Words, if_zero: Words) -> Words:
    return np.where((bits == ONE) if if_one.ndim == 1 else (bits == ONE)[:, None], if_one, if_zero)


def generate(
    generator: FixedKeyGenerator, alphas: Words, betas: Words, levels: int, comparison: bool, stream: CounterStream
) -> tuple[KeyBatch, KeyBatch]:
    """Returns a pair of keys per (alpha, beta), whose values sum to beta 1[x < alpha] or beta 1[x = alpha]."""
    assert 1 <= levels <= 63 and not np.any(alphas >> np.uint64(levels))
    count = alphas.size
    roots = stream.uint64(4 * count).astype(np.uint64).reshape(2, count, 2)
    state = [roots[0], roots[1]]
    control = [np.zeros(count, dtype=np.uint64), np.ones(count, dtype=np.uint64)]
    path_value = np.zeros(count, dtype=np.uint64)
    seeds, right, values = [], [], []
    for level in range(levels):
        bit = (alphas >> np.uint64(levels - 1 - level)) & ONE
        sign = ONE - control[1] * np.uint64(2)  # (-1)^control of the second key
        keep = [generator.expand(state[b], bit, comparison) for b in (0, 1)]
        lose = [generator.expand(state[b], bit ^ ONE, comparison) for b in (0, 1)]
        correction = (lose[0][0] ^ lose[1][0]) & np.array([SEED_MASK, ~np.uint64(0)])
        kept_bit = (keep[0][0][:, 0] ^ keep[1][0][:, 0] ^ ONE) & ONE  # control bits differ on the path,
        lost_bit = (lose[0][0][:, 0] ^ lose[1][0][:, 0]) & ONE  # and agree off it
        left_bit, right_bit = _choose(bit, lost_bit, kept_bit), _choose(bit, kept_bit, lost_bit)
        if comparison:
            lost, kept = (lose[0][1], lose[1][1]), (keep[0][1], keep[1][1])
            assert lost[0] is not None and lost[1] is not None and kept[0] is not None and kept[1] is not None
            # leaving alpha's path to the left (bit = 1) means x < alpha: there the sum becomes beta
            value = sign * (lost[1] - lost[0] - path_value + bit * betas)
            path_value = path_value - kept[1] + kept[0] + sign * value
            values.append(value)
        for b in (0, 1):
            mask = np.uint64(0) - control[b]
            new = keep[b][0][:, 0] & ONE
            control[b] = new ^ (control[b] & kept_bit)
            state[b] = keep[b][0] ^ (correction & mask[:, None])
        correction[:, 0] |= left_bit
        seeds.append(correction)
        right.append(right_bit)
    sign = ONE - control[1] * np.uint64(2)
    on_path = np.zeros(count, dtype=np.uint64) if comparison else betas
    final = sign * (state[1][:, 1] - state[0][:, 1] - path_value + on_path)
    words = (np.stack(seeds), np.stack(right), np.stack(values) if comparison else None, final)
    return KeyBatch(roots[0], *words), KeyBatch(roots[1], *words)


def _evaluate(generator: FixedKeyGenerator, server: int, keys: KeyBatch, points: Words) -> Words:
    state = keys.roots
    control = np.full(len(keys), server, dtype=np.uint64)
    total = np.zeros(len(keys), dtype=np.uint64)
    for level in range(keys.levels):
        bit = (points >> np.uint64(keys.levels - 1 - level)) & ONE
        child, value = generator.expand(state, bit, keys.values is not None)
        mask = np.uint64(0) - control
        if value is not None and keys.values is not None:
            total += value + (keys.values[level] & mask)
        on_right = control & keys.right[level]
        child ^= keys.seeds[level] & mask[:, None]  # the lowest bit is now the control bit on the left
        raw_right = child[:, 0] ^ (keys.seeds[level][:, 0] & mask) ^ on_right
        control = np.where(bit == ONE, raw_right, child[:, 0]) & ONE
        state = child
    total += state[:, 1] + (keys.final & (np.uint64(0) - control))
    return total if server == 0 else np.uint64(0) - total


def evaluate(generator: FixedKeyGenerator, server: int, keys: KeyBatch, points: Words | int) -> Words:
    """Returns the server's share of f(point) for every key, with one point for all or one per key."""
    assert server in (0, 1)
    at = np.broadcast_to(np.asarray(points, dtype=np.uint64), (len(keys),))
    assert not np.any(at >> np.uint64(keys.levels))
    starts = range(0, len(keys), _CHUNK)
    parts = [
        _evaluate(generator, server, keys.part(s, s + _CHUNK), np.ascontiguousarray(at[s : s + _CHUNK])) for s in starts
    ]
    return np.concatenate(parts)


def sum_everywhere(generator: FixedKeyGenerator, server: int, keys: KeyBatch) -> Words:
    """Returns the server's shares of sum over the keys of f(x), at all 2^levels points, for point functions.

    Every node of the tree is expanded once: levels times less work than `evaluate` at each point.
    """
    assert keys.values is None
    total = np.zeros(1 << keys.levels, dtype=np.uint64)
    step = max(1, (1 << 17) >> keys.levels)
    for start in range(0, len(keys), step):
        total += _leaves(generator, server, keys.part(start, start + step)).sum(axis=0, dtype=np.uint64)
    return total if server == 0 else np.uint64(0) - total


def _leaves(generator: FixedKeyGenerator, server: int, keys: KeyBatch) -> Words:
    """Returns unsigned shares (n, 2^levels)."""
    count = len(keys)
    state = keys.roots[:, None, :]
    control = np.full((count, 1), server, dtype=np.uint64)
    for level in range(keys.levels):
        nodes = np.ascontiguousarray(state).reshape(-1, 2)
        mask = np.uint64(0) - control
        correction = keys.seeds[level][:, None, :] & mask[:, :, None]
        sides = [generator.expand(nodes, np.uint64(side), False)[0].reshape(state.shape) for side in (0, 1)]
        raw_right = sides[1][:, :, 0] ^ (control & keys.right[level][:, None])
        left, right = sides[0] ^ correction, sides[1] ^ correction
        state = np.stack([left, right], axis=2).reshape(count, -1, 2)
        control = np.stack([left[:, :, 0] & ONE, raw_right & ONE], axis=2).reshape(count, -1)
    return state[:, :, 1] + (keys.final[:, None] & (np.uint64(0) - control))
