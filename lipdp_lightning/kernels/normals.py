"""Draws standard normals in float64 from a key: ChaCha20 words, then the transformation of Box and Muller.

The definition, for a key of 32 bytes and a stream number: the key stream of ChaCha20 (RFC 8439) under the nonce that
the stream's number encodes, from block 0 on, read as 64-bit little-endian integers w_0, w_1, ... The normals 2j and
2j + 1 are r cos a and r sin a, with r = sqrt(-ln((w_2j^2 + 1) / 2^126)) and a = 2 pi w_2j+1 / 2^64. Each normal is a
function of the key, the stream and its own position alone, so that any device may draw any part of a stream.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from .loops import cpu_loops

NORMALS_IN_A_BLOCK = 8  # a block of ChaCha20 has 64 bytes
_BYTES_OF_A_NORMAL = 8


def normals(key: bytes, stream: int, start: int, count: int) -> Tensor:
    """Returns the normals ``start`` to ``start + count`` of a stream, float64 on the CPU.

    The bits are the same on every processor. ``start`` is a multiple of the 8 normals of one block.

    Args:
        key: 32 bytes that no other draw uses.
        stream: number of the stream, from 0 on.
    """
    words = stream_words(key, stream, start, count + count % 2)
    drawn = np.empty(len(words))
    cpu_loops().normals(words, drawn)
    return torch.from_numpy(drawn)[:count]


def normals_by_torch(words: Tensor) -> Tensor:
    """Computes the normals of an even number of int64 words as the definition says, up to rounding."""
    radii, angles = words[0::2].double(), words[1::2].double()
    radius = (-((radii.square() + 1.0) * 2.0**-126).log()).sqrt()
    angle = angles * (math.pi * 2.0**-63)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1).flatten()


def stream_words(key: bytes, stream: int, start: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Returns the words ``start`` to ``start + count`` of a stream; ``start`` is a multiple of the 8 of one block."""
    assert start % NORMALS_IN_A_BLOCK == 0 and start // NORMALS_IN_A_BLOCK + count < 1 << 32
    counter, nonce = (start // NORMALS_IN_A_BLOCK).to_bytes(4, "little"), stream.to_bytes(12, "little")
    encryptor = Cipher(algorithms.ChaCha20(key, counter + nonce), mode=None).encryptor()
    words = np.empty(count, dtype="<i8")
    encryptor.update_into(bytes(words.nbytes), words.view(np.uint8).data)
    return words
