"""Names the bits of tensors by a keyed hash that is computed where they lie, with 32 bytes for the host.

The definition, for words x of 32 bits and a key of uniform 64-bit integers: the words are cut into rows of ``ROW``,
zeros fill the last one, and row x is replaced by its four sums of key[s, i] * x[i] modulo 2^64, s = 0 to 3. While there
is more than one row, the sums are the words of the next level, which has a key of its own. Sums modulo 2^64 do not
depend on their order, so every device returns the same bits for every way to split the work.

Guarantee: two different lists of words of one length, chosen without knowledge of the key and of earlier hashes, are
given the same hash with probability at most ``LEVELS`` * 2^-132 < 2^-130, for up to 2^38 bytes. Proof: let two rows of
one level differ in word i, by d with 0 < |d| < 2^32. Fix all of the key but key[s, i]. The sums s agree if
key[s, i] * d equals a certain number modulo 2^64. d is an odd number times 2^t with t <= 31, so at most 2^t values of
key[s, i] do it, and the probability is at most 2^31 / 2^64 = 2^-33. The keys of the four sums are independent, hence
2^-132 for one row. If rows differ and their sums do too, the next level is given different words, and its key is
independent of them; the last sums agree only if those of some level did, and the levels' probabilities add. Among n
states there are fewer than n^2 / 2 pairs, and their probabilities add as well. The key comes from ChaCha20 in place of
uniform numbers, which adds what an attack on ChaCha20 can gain.

Whoever sees hashes may learn the key, as it is linear. They are therefore not to be shown, but by a one-way function.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .loops import gpu_kernels
from .normals import stream_words

ROW = 1 << 14  # words of a row; its sums are 8 words of the next level
SUMS = 4  # of 64 bits
LEVELS = 3
_BYTES = 4 * ROW
_AT_ONCE = 1 << 7  # rows, so that products take 64 MB


def key_table(key: bytes) -> Tensor:
    """Returns the key of every level, sum and place in a row, as int64 on the CPU.

    Args:
        key: 32 bytes that nothing else uses.
    """
    words = torch.from_numpy(stream_words(key, 0, 0, LEVELS * SUMS * ROW))
    return words.view(LEVELS, SUMS, ROW)


def multilinear_hash(tensors: Sequence[Tensor], table: Tensor) -> Tensor:
    """Returns the four sums of the tensors' bits, one tensor after the other, on the device where all of them lie.

    Dtypes and shapes do not enter: they say where a tensor ends, and are for the caller to name.
    """
    rows = rows_of(tensors)
    for level in range(LEVELS):
        sums = _row_sums(rows, table[level])
        if len(rows) == 1:
            return sums[0]
        rows = rows_of([sums])
    raise AssertionError("more than 2^38 bytes")


def rows_of(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the bits of tensors, in the order of their entries, as rows of int32 that zeros fill up."""
    parts = [_bytes_of(tensor) for tensor in tensors]
    length = sum(len(part) for part in parts)
    missing = -length % _BYTES if length else _BYTES
    if missing:
        parts.append(torch.zeros(missing, dtype=torch.uint8, device=parts[0].device))
    return torch.cat(parts).view(torch.int32).view(-1, ROW)


def _bytes_of(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)


def _row_sums(rows: Tensor, key: Tensor) -> Tensor:
    kernels = gpu_kernels(rows.device)
    return row_sums_by_torch(rows, key) if kernels is None else kernels.row_sums(rows, key)


def row_sums_by_torch(rows: Tensor, key: Tensor) -> Tensor:
    """Computes the sums of every row as the definition says."""
    parts = [(part.long().unsqueeze(1) * key).sum(dim=2) for part in rows.split(_AT_ONCE)]
    return torch.cat(parts)
