"""Standard normals in float64 from uniform 64-bit words of a key: AES-256 in counter mode, then Box-Muller.

The words of a chunk are the key stream of AES-GCM under a nonce of its own, its place: the same counter mode, by the
code that encrypts fastest. The transformation is compiled (box_muller.py), and returns the same bits everywhere.
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

if TYPE_CHECKING:
    from ..compiled import Loop

CHUNK = 1 << 15
"""Normals that are cut from the stream at once: what a step of the transformation works on fits a processor's cache."""

Array = npt.NDArray[np.float64]
Words = npt.NDArray[np.int64]

_WORD_BYTES = 8
_BLOCK_BYTES = 16
_TAG_BYTES = 16  # AES-GCM writes a tag behind the key stream
_ZEROS = bytes(CHUNK * _WORD_BYTES)  # encrypting zeros yields the key stream itself


class Normals:
    """The normals of one key: those of a chunk are a function of (key, place of the chunk, its length).

    Args:
        key: 32 bytes that nothing else is encrypted with.
        position: of the first chunk, in blocks of two normals.
        threads: that share the work; they do not change a bit.
    """

    def __init__(self, key: bytes, position: int, threads: int = 1) -> None:
        self.cipher, self.position, self.threads = AESGCM(key), position, threads

    def write(self, out: Array) -> None:
        """Fill `out`, of an even length."""
        for start, words in words_of([self], len(out)):
            rows = words[0]
            transformation().shared(self.threads, rows, out[start : start + rows.size].reshape(rows.shape))


def words_of(streams: Sequence[Normals], total: int) -> Iterator[tuple[int, Words]]:
    """The words of `total` normals, an even number, of each stream: (place of the first normal, rows of words).

    ``words[k, i]`` are the words of one chunk of stream k; what is left of a chunk is a piece of its own. The memory of
    a piece is that of the next one.
    """
    at_once = _at_once(streams[0].threads)
    whole = total - total % CHUNK
    cuts = [(start, min(at_once, whole - start), CHUNK) for start in range(0, whole, at_once)]
    cuts += [(whole, total - whole, total - whole)] if whole < total else []
    buffer = np.empty(len(streams) * min(at_once, total) * _WORD_BYTES + _TAG_BYTES, dtype=np.uint8)
    for start, count, size in cuts:
        _encrypt(streams, buffer.data, start, count, size)
        yield start, buffer[: len(streams) * count * _WORD_BYTES].view("<i8").reshape(len(streams), -1, size)


def _at_once(threads: int) -> int:
    return CHUNK if threads == 1 else 2 * threads * CHUNK  # two chunks for each thread cost fewer waits


def _encrypt(streams: Sequence[Normals], buffer: memoryview, start: int, count: int, size: int) -> None:
    zeros, place, length = memoryview(_ZEROS)[: size * _WORD_BYTES], 0, size * _WORD_BYTES
    for stream in streams:
        block = stream.position + start * _WORD_BYTES // _BLOCK_BYTES
        for nonce in range(block, block + count * _WORD_BYTES // _BLOCK_BYTES, length // _BLOCK_BYTES):
            # a chunk's tag lies where the next one's words begin: chunks are written in order
            stream.cipher.encrypt_into(
                nonce.to_bytes(12, "big"), zeros, None, buffer[place : place + length + _TAG_BYTES]
            )
            place += length


@lru_cache(maxsize=1)
def transformation() -> Loop:
    """Compiled when it is asked for first: numba takes half a second to import, and many commands draw nothing."""
    from .box_muller import transform

    return transform


@lru_cache(maxsize=1)
def numeric_environment() -> bytes:
    """What decides the last bits of a sum of gradients: torch and the vector unit.

    A replay on another kind of processor may differ in the last bit of what the noise is added to, hence is not the
    same release. Given to `state_digest`, it makes such a replay draw fresh noise. The functions are chosen when torch
    is loaded, so that they are named by what they return.
    """
    parts = (torch.__version__, torch.backends.cpu.get_cpu_capability(), platform.machine())
    values = torch.arange(1, 4097, dtype=torch.float64, device="cpu") / 4097
    returned = torch.cat([values.log(), values.sqrt(), (values * math.pi).sin(), (values * math.pi).cos()])
    return "|".join(parts).encode() + hashlib.sha256(returned.numpy().tobytes()).digest()
