"""Draws standard normals in float64 from a key, and adds them to a sum: ChaCha20 words, transformed by Box and Muller.

The definition, for a key of 32 bytes and a stream number: the key stream of ChaCha20 (RFC 8439) under the nonce that
the stream's number encodes, from block 0 on, read as 64-bit little-endian integers w_0, w_1, ... The normals 2j and
2j + 1 are r cos a and r sin a, with r = sqrt(-ln((w_2j^2 + 1) / 2^126)) and a = 2 pi w_2j+1 / 2^64. Each normal is a
function of the key, the stream and its own position alone, so that any device may draw any part of a stream.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from .loops import cpu_loops, gpu_kernels

NORMALS_IN_A_BLOCK = 8  # a block of ChaCha20 has 64 bytes
SECURE_SAMPLES = 4  # a square, so that the scale 1/sqrt(4) is exact
PIECE = 1 << 14  # normals at a time: they stay in a processor's cache


def normals(key: bytes, stream: int, start: int, count: int, samples: int = 1) -> Tensor:
    """Returns the normals ``start`` to ``start + count`` of a stream, float64 on the CPU.

    The bits are the same on every processor. ``start`` is a multiple of the 8 normals of one block.

    Args:
        key: 32 bytes that no other draw uses.
        stream: number of the stream, from 0 on.
        samples: the number of streams, from this one on, whose sum is divided by the root of their number.
    """
    total = np.zeros(0)
    for sample in range(samples):
        drawn = np.empty(count + count % 2)
        cpu_loops().normals(stream_words(key, stream + sample, start, len(drawn)), drawn)
        total = total + drawn if sample else drawn
    return torch.from_numpy(total if samples == 1 else total * (1 / math.sqrt(samples)))[:count]


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


def release_(
    values: Tensor, key: bytes, deviation: float, *, stream: int = 0, apart: Tensor | None = None, samples: int = 1,
    share: float = 1.0, shift: float = 0.0, factor: float = 1.0,
) -> None:  # fmt: skip
    """Replaces a sum by its release, in place: entry i of the flat tensor is given normal i.

    It becomes ((values + apart) * share + deviation * normal), rounded to the grid that ``shift`` is for, times
    ``factor``, all in float64. A loop on a CPU, a GPU's kernel, which draws the noise where it is added, and torch's
    operations return the same bits.

    Args:
        values: floating-point, of any layout; what is narrower than float32 is rounded to float32 first.
        key: 32 bytes that no other draw uses.
        stream: number of the first stream.
        apart: a further part of the sum, in float64.
        samples: the same number as for ``normals``.
        shift: the result of ``privacy.grid.grid_shift``; with 0, nothing is rounded to a grid.
    """
    if not values.numel():
        return
    numbers: dict[str, Any] = {"stream": stream, "samples": samples, "share": share, "shift": shift, "factor": factor}
    if values.is_cpu:
        _release_in_pieces(values, key, deviation, apart, **numbers)
    elif deviation > 0 and (kernels := gpu_kernels(values.device)) is not None:
        kernels.release_(values, key, deviation, apart=apart, **numbers)
    else:
        total = values.reshape(-1).double()
        total = (total if apart is None else total + apart.reshape(-1)) * share
        if deviation > 0:
            total = normals(key, stream, 0, len(total), samples).mul_(deviation).to(total.device).add_(total)
        values.copy_((total.add(shift).sub_(shift) * factor).view(values.shape))


def _release_in_pieces(
    values: Tensor, key: bytes, deviation: float, apart: Tensor | None, stream: int, samples: int, share: float,
    shift: float, factor: float,
) -> None:  # fmt: skip
    exact = values.dtype in (torch.float32, torch.float64)
    flat = (values.detach() if exact else values.detach().float()).contiguous().view(-1)
    entries, further = flat.numpy(), np.empty(0) if apart is None else apart.reshape(-1).numpy()
    for start in range(0, len(entries), PIECE):
        piece = slice(start, start + PIECE)
        count = len(entries[piece])
        drawn = normals(key, stream, start, count, samples).numpy() if deviation > 0 else np.zeros(count)
        cpu_loops().complete(entries[piece], further[piece], drawn, deviation, share, shift, factor)
        del drawn  # before the next piece is drawn, so that memory holds one of them
    if not (exact and values.is_contiguous()):
        values.copy_(flat.view(values.shape))
