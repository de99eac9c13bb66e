"""Poisson samples, as pure functions of a secret and a step.

Subsampling amplifies privacy only if each example is drawn with probability at most sample_rate, independently
of the others and afresh at each step (docs/guarantee.md, sections 1.1 and 1.7). An empty sample is a step like
any other: it is never redrawn, since whether a redraw happened would depend on the data set.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from lipdp_lightning.privacy.keys import derive_key

_WORDS = 1 << 64
_HALF = 1 << 32
_BLOCK = 1 << 18  # words drawn at a time, which bounds the memory
_ZEROS = bytes(4 * _BLOCK)  # encrypting zeros yields the key stream itself
_TAG_BYTES = 16  # AES-GCM writes a tag after the stream


@lru_cache(maxsize=16)
def _threshold(sample_rate: float) -> tuple[int, int]:
    """Returns the upper and lower 32 bits of the rate, rounded down from its exact value as a fraction."""
    return divmod(math.floor(Fraction(sample_rate) * _WORDS), _HALF)


class SampleCiphers:
    """The ciphers with which a run draws its samples; they are made once for many samples.

    Under the nonce of a step, a cipher's key stream is that of AES-256 in counter mode; no other step has its words.
    The ciphers are as secret as the run's secret. Only the run may hold them, so they are not cached.
    """

    def __init__(self, secret: bytes) -> None:
        self.upper = AESGCM(derive_key(secret, "sampling"))
        self.lower = AESGCM(derive_key(secret, "sampling, lower halves"))


def poisson_sample(secret: bytes | SampleCiphers, step: int, dataset_size: int, sample_rate: float) -> Tensor:
    """Returns sorted indices (int64) of a Poisson sample of range(dataset_size): pure in (secret, step).

    Every index is in the sample with probability floor(sample_rate * 2^64) / 2^64, independently of the others. This is
    never above the declared rate, and below it by less than 2^-64. A rate of 1 selects everything. The sample may be
    empty.

    Args:
        secret: the run's secret, or the ciphers that were made from it.
        step: the number of the step, from 0 on.
        dataset_size: the number of rows.
        sample_rate: the probability of each row.

    Raises:
        ValueError: if a number is out of range.
    """
    problems = []
    if dataset_size < 1:
        problems.append(f"dataset_size {dataset_size} is not positive.")
    if not 0 < sample_rate <= 1:
        problems.append(f"sample_rate {sample_rate} is not in (0, 1].")
    if step < 0:
        problems.append(f"step {step} is negative.")
    if problems:
        raise ValueError("\n".join([*problems, "HINT: take them from the run's PrivacyPlan."]))
    if sample_rate == 1:
        return torch.arange(dataset_size)
    upper, lower = _threshold(sample_rate)
    ciphers = SampleCiphers(secret) if isinstance(secret, bytes) else secret
    parts = []
    for start in range(0, dataset_size, _BLOCK):
        count = min(_BLOCK, dataset_size - start)
        words = _words(ciphers.upper, step, start, count)
        (selected,) = (words <= upper).nonzero()
        # a word equal to the threshold's upper half leaves it open: the lower half, drawn by the other cipher, decides
        undecided = words[selected] == upper
        if undecided.any():
            halves = _words(ciphers.lower, step, start, count)
            selected = selected[~undecided | (halves[selected] < lower)]
        parts.append(torch.from_numpy(selected) + start if start else torch.from_numpy(selected))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _words(cipher: AESGCM, step: int, start: int, count: int) -> npt.NDArray[np.uint32]:
    """Returns uniform words for the indices from ``start`` on; every block has its own nonce."""
    buffer = np.empty(4 * count + _TAG_BYTES, dtype=np.uint8)
    nonce = step.to_bytes(8, "big") + (start // _BLOCK).to_bytes(4, "big")
    cipher.encrypt_into(nonce, memoryview(_ZEROS)[: 4 * count], None, buffer.data)
    return buffer[: 4 * count].view("<u4")


def local_slice(indices: Tensor, rank: int, world_size: int, chunk: int = 0, chunks: int = 1) -> Tensor:
    """Returns the share of a sample that one rank processes in one micro-batch.

    Over all ranks and chunks, the shares partition the sample: each index occurs once, and sizes differ by at most one,
    also in total by rank and by chunk. A share may be empty; its rank still takes part in the step.
    """
    if not (0 <= rank < world_size and 0 <= chunk < chunks):
        raise ValueError(
            f"rank {rank} of {world_size}, chunk {chunk} of {chunks} is not a share: examples would be lost or "
            "used twice.\nHINT: it needs 0 <= rank < world_size and 0 <= chunk < chunks."
        )
    return indices if world_size * chunks == 1 else indices[chunk * world_size + rank :: world_size * chunks]
