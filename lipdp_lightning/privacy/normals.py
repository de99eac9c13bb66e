"""Standard normals in float64 from uniform 64-bit words of a key: AES-256 in counter mode, then Box-Muller.

The words of a chunk are the key stream of AES-GCM under a nonce of its own, its place: the same counter mode, by the
code that encrypts fastest. The transformation is compiled (box_muller.py), and returns the same bits everywhere.
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Callable
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
Visit = Callable[[int, Array], None]

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
        self._cipher, self._position, self._threads = AESGCM(key), position, threads
        self._at_once = CHUNK if threads == 1 else 2 * threads * CHUNK  # two chunks for each thread cost fewer waits

    def write(self, out: Array) -> None:
        """Fill `out`, of an even length."""
        room = _Room(min(self._at_once, len(out)))
        for start, stop in self._cuts(len(out)):
            self._make(start, out[start:stop], room)

    def visit(self, count: int, visit: Visit) -> None:
        """The same without holding them all: ``visit(start, piece)`` in order; a piece is the visitor's until it
        returns."""
        total = count + count % 2
        room = _Room(min(self._at_once, total))
        own = np.empty(room.size)
        for start, stop in self._cuts(total):
            piece = own[: stop - start]
            self._make(start, piece, room)
            visit(start, piece[: count - start])

    def _cuts(self, total: int) -> list[tuple[int, int]]:
        """Several whole chunks at a time; what is left of a chunk is a piece of its own."""
        whole = total - total % CHUNK
        cuts = [(start, min(start + self._at_once, whole)) for start in range(0, whole, self._at_once)]
        return cuts + ([(whole, total)] if whole < total else [])

    def _make(self, start: int, piece: Array, room: _Room) -> None:
        size = min(CHUNK, len(piece))  # several whole chunks, or one that may be shorter
        zeros = memoryview(_ZEROS)[: size * _WORD_BYTES]
        for first in range(0, len(piece), size):
            nonce = (self._position + (start + first) * _WORD_BYTES // _BLOCK_BYTES).to_bytes(12, "big")
            self._cipher.encrypt_into(nonce, zeros, None, room.of_chunk(first, size))
        words = room.words[: len(piece)].reshape(-1, size)
        transformation().shared(self._threads, words, piece.reshape(-1, size))


@lru_cache(maxsize=1)
def transformation() -> Loop:
    """Compiled when it is asked for first: numba takes half a second to import, and many commands draw nothing."""
    from .box_muller import transform

    return transform


class _Room:
    """Memory for the words of `size` normals, at most several chunks of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        # a chunk's tag lies where the next one's words begin: chunks are written in order
        self._buffer = np.empty(size * _WORD_BYTES + _TAG_BYTES, dtype=np.uint8)
        self.words = self._buffer[: size * _WORD_BYTES].view("<i8")

    def of_chunk(self, first: int, size: int) -> memoryview:
        return self._buffer.data[first * _WORD_BYTES : (first + size) * _WORD_BYTES + _TAG_BYTES]


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
