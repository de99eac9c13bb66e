"""Standard normals in float64 from uniform 64-bit words of a key: AES-256 in counter mode, then Box-Muller.

The words of a chunk are the key stream of AES-GCM under a nonce of its own, its place: the same counter mode, by the
code that encrypts fastest. Chunks are transformed several at a time, so that torch shares the work among its threads.
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

CHUNK = 1 << 15
"""Normals that are cut from the stream at once: what a step of the transformation works on fits a processor's cache."""

Visit = Callable[[int, Tensor], None]

_WORD_BYTES = 8
_BLOCK_BYTES = 16
_TAG_BYTES = 16  # AES-GCM writes a tag behind the key stream
_RADIANS = math.pi * 2.0**-63
_ZEROS = bytes(CHUNK * _WORD_BYTES)  # encrypting zeros yields the key stream itself


def normals_from_words_(words: Tensor, out: Tensor, scratch: Tensor) -> None:
    """Box-Muller, in the last dimension: 2h uniform 64-bit words (int64) to 2h standard normals in `out` (float64).

    For pair j, u^2 = (words[j]^2 + 1) / 2^126 with u in (0, 1], so its logarithm is finite, and the angle is
    a = 2 pi words[h + j] / 2^64, in [-pi, pi]. With r = sqrt(-ln u^2), out[j] = r cos(a) and out[h + j] = r sin(a).
    The smallest u is 2^-63: r reaches 9.345, which the true law exceeds with probability 1.1e-19. `scratch` has h
    float64 in the last dimension.
    """
    half = words.shape[-1] // 2
    (radius, sine), (lengths, angles) = torch.split(out, half, -1), torch.split(words, half, -1)
    radius.copy_(lengths)
    torch.addcmul(_smallest(), radius, radius, value=2.0**-126, out=radius)
    radius.log_().neg_().sqrt_()
    scratch.copy_(angles).mul_(_RADIANS)
    torch.sin(scratch, out=sine)
    sine.mul_(radius)
    radius.mul_(scratch.cos_())


@lru_cache(maxsize=1)
def _smallest() -> Tensor:
    return torch.tensor(2.0**-126, dtype=torch.float64, device="cpu")


class Normals:
    """The normals of one key: those of a chunk are a function of (key, place of the chunk, its length).

    Args:
        key: 32 bytes that nothing else is encrypted with.
        position: of the first chunk, in blocks of two normals.
    """

    def __init__(self, key: bytes, position: int) -> None:
        self._cipher, self._position = AESGCM(key), position

    def write(self, out: Tensor, at_once: int) -> None:
        """Fill `out`, of an even length. The same bits for any number of chunks that are made at once."""
        room = _Room(min(at_once * CHUNK, len(out)))
        for start, stop in _cuts(len(out), at_once):
            self._make(start, out[start:stop], room)

    def visit(self, count: int, visit: Visit, at_once: int) -> None:
        """The same without holding them all: ``visit(start, piece)`` in order; a piece is the visitor's until it
        returns."""
        total = count + count % 2
        room = _Room(min(at_once * CHUNK, total))
        own = torch.empty(room.size, dtype=torch.float64, device="cpu")
        for start, stop in _cuts(total, at_once):
            piece = own[: stop - start]
            self._make(start, piece, room)
            visit(start, piece[: count - start])

    def _make(self, start: int, piece: Tensor, room: _Room) -> None:
        size = min(CHUNK, len(piece))  # several whole chunks, or one that may be shorter
        for first in range(0, len(piece), size):
            nonce = (self._position + (start + first) * _WORD_BYTES // _BLOCK_BYTES).to_bytes(12, "big")
            target = room.of_chunk(first, size)
            self._cipher.encrypt_into(nonce, memoryview(_ZEROS)[: size * _WORD_BYTES], None, target)
        words, scratch = room.words[: len(piece)], room.scratch[: len(piece) // 2]
        normals_from_words_(words.view(-1, size), piece.view(-1, size), scratch.view(-1, size // 2))


class _Room:
    """Memory for the words of `size` normals, at most several chunks of them, and for half as many numbers."""

    def __init__(self, size: int) -> None:
        self.size = size
        # a chunk's tag lies where the next one's words begin: chunks are written in order
        self._buffer = np.empty(size * _WORD_BYTES + _TAG_BYTES, dtype=np.uint8)
        self.words = torch.from_numpy(self._buffer[: size * _WORD_BYTES].view("<i8"))
        self.scratch = torch.empty(size // 2, dtype=torch.float64, device="cpu")

    def of_chunk(self, first: int, size: int) -> memoryview:
        return self._buffer.data[first * _WORD_BYTES : (first + size) * _WORD_BYTES + _TAG_BYTES]


def _cuts(total: int, at_once: int) -> list[tuple[int, int]]:
    """Several whole chunks at a time; what is left of a chunk is a piece of its own."""
    whole = total - total % CHUNK
    cuts = [(start, min(start + at_once * CHUNK, whole)) for start in range(0, whole, at_once * CHUNK)]
    return cuts + ([(whole, total)] if whole < total else [])


@lru_cache(maxsize=1)
def numeric_environment() -> bytes:
    """What decides the last bits of a float64 logarithm, of a sine or of a sum: torch and the vector unit.

    A replay on another kind of processor may differ in the last bit, hence is not the same release. Given to
    `state_digest`, it makes such a replay draw fresh noise. The functions are chosen when torch is loaded, so that they
    are named by what they return.
    """
    parts = (torch.__version__, torch.backends.cpu.get_cpu_capability(), platform.machine())
    values = torch.arange(1, 4097, dtype=torch.float64, device="cpu") / 4097
    returned = torch.cat([values.log(), values.sqrt(), (values * math.pi).sin(), (values * math.pi).cos()])
    return "|".join(parts).encode() + hashlib.sha256(returned.numpy().tobytes()).digest()
