"""The stream of random bytes, words and normals that belongs to a key."""

from __future__ import annotations

import builtins

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from .kernels.normals import normals
from .privacy.keys import KEY_BYTES, derive_key

BLOCK_BYTES = 16  # one AES block, which is the unit of a stream's position
_WORD_BYTES = 8
_ZEROS = bytes(1 << 20)  # encrypting zeros yields the key stream itself


class CounterStream:
    """The AES-256-CTR stream of one key. `position` counts blocks of 16 bytes.

    Every draw starts at a block boundary and drops the rest of its last block. Hence bytes and words that are drawn in
    pieces of whole blocks (`seek` to each piece's position, in any order, in any thread) equal those of one draw.
    """

    def __init__(self, key: bytes, position: int = 0) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(
                f"a stream's key has {KEY_BYTES} bytes, {len(key)} were given.\n"
                "HINT: use CounterStream(derive_key(secret, purpose, ...))."
            )
        self._key = key
        self.position = 0
        self.seek(position)

    def seek(self, block: int) -> None:
        """Continues at the given block (of 16 bytes) of the stream."""
        assert 0 <= block < 1 << 128
        self.position = block

    def bytes(self, count: int) -> builtins.bytes:
        """Returns the next ``count`` bytes."""
        return self._draw(count).tobytes()

    def uint64(self, count: int) -> npt.NDArray[np.uint64]:
        """Returns the next ``count`` uniform 64-bit words, little-endian on every machine."""
        return self._draw(count * _WORD_BYTES).view("<u8")

    def normal(self, count: int) -> Tensor:
        """Returns ``count`` standard normals, float64 on the CPU: a function of (key, position, count) only."""
        assert count >= 0
        drawn = normals(derive_key(self._key, "normals", self.position), 0, 0, count)
        self.position += _blocks(count * _WORD_BYTES)
        return drawn

    def _draw(self, count: int) -> npt.NDArray[np.uint8]:
        assert count >= 0
        buffer = np.empty(count + BLOCK_BYTES, dtype=np.uint8)  # update_into requires one block more than it writes
        counter = modes.CTR(self.position.to_bytes(BLOCK_BYTES, "big"))
        encryptor = Cipher(algorithms.AES(self._key), counter).encryptor()
        view, zeros = buffer.data, memoryview(_ZEROS)
        for start in range(0, count, len(_ZEROS)):
            written = encryptor.update_into(zeros[: min(len(_ZEROS), count - start)], view[start:])
            assert written == min(len(_ZEROS), count - start)
        self.position += _blocks(count)
        return buffer[:count]


def _blocks(count: int) -> int:
    return -(-count // BLOCK_BYTES)
