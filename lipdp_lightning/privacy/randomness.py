"""Keyed randomness: one secret, one key per purpose, one counter stream per key.

Everything random that touches private data comes from here, never from the global generators of torch or
numpy: torch's CPU generator keeps 32 bits of its seed, so keyed draws would repeat each other's noise, and
its fp32 normal cannot exceed 5.77. Guarantees (docs/guarantee.md, randomness):

* keys: HMAC-SHA256 of an injective encoding of (purpose, indices); two different tuples never share a key;
* streams: AES-256 in counter mode; the bytes at a position depend on (key, position) alone;
* normals: float64, one Box-Muller pair from two 64-bit words, support out to 9.34 standard deviations.
"""

from __future__ import annotations

import builtins
import hashlib
import hmac
import math
import operator
import platform
import secrets
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

SECRET_BYTES = 16
KEY_BYTES = 32
BLOCK_BYTES = 16  # one AES block: the unit of a stream's position
_WORD_BYTES = 8
_ZEROS = bytes(1 << 18)  # encrypting zeros yields the key stream itself
# Normals are made in chunks of this many: they stay in the L2 cache, and are below the grain size (32768)
# under which torch runs an element-wise kernel on one thread, so torch's own thread count splits no kernel.
_CHUNK = len(_ZEROS) // _WORD_BYTES
_LOW_63_BITS = (1 << 63) - 1


def new_secret() -> bytes:
    """128 bits from the operating system: not to be logged, configured, or kept but in resume checkpoints."""
    return secrets.token_bytes(SECRET_BYTES)


def derive_key(secret: bytes, purpose: str, *indices: int | bytes) -> bytes:
    """The 32-byte key of (purpose, indices) under the secret, by HMAC-SHA256.

    The encoding is injective: texts and bytes carry a type tag and their length, integers a tag and 16 signed
    bytes. Hence ("a", 12, 3), ("a", 1, 23), ("a1", 2, 3) and ("a", b"12", 3) have unrelated keys.
    """
    if len(secret) < SECRET_BYTES:
        raise ValueError(
            f"a secret of {len(secret)} bytes was given; fewer than {SECRET_BYTES} can be guessed, "
            "and who guesses the secret subtracts the noise.\n"
            "HINT: use new_secret(), or a fixed 16-byte secret in tests."
        )
    message = bytearray(_encode_bytes(b"p", purpose.encode()))
    for index in indices:
        message += _encode_bytes(b"b", index) if isinstance(index, bytes) else _encode_integer(index)
    return hmac.digest(secret, bytes(message), "sha256")


def _encode_bytes(tag: bytes, data: bytes) -> bytes:
    return tag + len(data).to_bytes(8, "big") + data


def _encode_integer(value: int) -> bytes:
    number = operator.index(value)
    if not -(1 << 127) <= number < 1 << 127:
        raise ValueError(
            f"the key index {number} does not fit in 128 bits.\nHINT: pass its bytes, or a digest of them."
        )
    return b"i" + number.to_bytes(16, "big", signed=True)


def state_digest(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], *context: bytes) -> bytes:
    """32 bytes that name the state a step starts from: names, dtypes, shapes and every bit of the tensors.

    As part of the noise key it makes an exact replay of a step repeat its noise (the same release again,
    which costs nothing), and any other continuation draw fresh noise. `context` carries the rest of what
    the released sum depends on: plan digest, data fingerprint, world size, code version,
    numeric_environment(). SHA-256: with the instructions of current processors it takes less time than
    blake2b.
    """
    digest = hashlib.sha256()
    for item in context:
        digest.update(_encode_bytes(b"c", item))
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        digest.update(_encode_bytes(b"n", f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode()))
        # as bytes: numpy lacks bf16, and -0.0 differs from 0.0; the header determines the length
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.cpu().numpy().data)
    return digest.digest()


def numeric_environment() -> bytes:
    """What decides the last bits of a float64 logarithm or cosine: torch and the vector unit.

    A replay on another kind of processor may differ in the last bit, hence is not the same release. Given to
    `state_digest`, it makes such a replay draw fresh noise.
    """
    parts = (torch.__version__, torch.backends.cpu.get_cpu_capability(), platform.machine())
    return "|".join(parts).encode()


def normals_from_words_(words: Tensor, out: Tensor, scratch: Tensor) -> None:
    """Box-Muller: 2h uniform 64-bit words (int64, overwritten) to 2h standard normals in `out` (float64).

    For pair j, u = (low 63 bits of words[j] + 1) / 2^63 lies in (0, 1], so its logarithm is finite, and the
    angle is a = 2 pi words[h + j] / 2^64, in [-pi, pi]. With r = sqrt(-2 ln u), out[j] = r cos(a) and
    out[h + j] = r sin(a). The smallest u is 2^-63: r reaches 9.345, which the true law exceeds with
    probability 1.1e-19. `scratch` has h float64.
    """
    half = words.numel() // 2
    radius, angle = out[:half], out[half:]
    radius.copy_(words[:half].bitwise_and_(_LOW_63_BITS))
    radius.add_(1.0).mul_(2.0**-63).log_().mul_(-2.0).sqrt_()
    angle.copy_(words[half:]).mul_(math.pi * 2.0**-63)
    torch.cos(angle, out=scratch)
    angle.sin_().mul_(radius)
    radius.mul_(scratch)


class CounterStream:
    """The AES-256-CTR stream of one key. `position` counts blocks of 16 bytes.

    Every draw starts at a block boundary and drops what is left of its last block, so bytes and words drawn
    in pieces of whole blocks (`seek` to each piece's position, in any order, in any thread) equal one draw.
    """

    def __init__(self, key: bytes, position: int = 0) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(
                f"a stream's key has {KEY_BYTES} bytes, {len(key)} were given.\n"
                "HINT: CounterStream(derive_key(secret, purpose, ...))."
            )
        self._key = key
        self.position = 0
        self.seek(position)

    def seek(self, block: int) -> None:
        """Continue at the given block (of 16 bytes) of the stream."""
        assert 0 <= block < 1 << 128
        self.position = block

    def bytes(self, count: int) -> builtins.bytes:
        """The next `count` bytes."""
        return self._draw(count).tobytes()

    def uint64(self, count: int) -> npt.NDArray[np.uint64]:
        """The next `count` uniform 64-bit words, little-endian on every machine."""
        return self._draw(count * _WORD_BYTES).view("<u8")

    def normal(self, count: int, threads: int = 1) -> Tensor:
        """`count` standard normals, float64 on the CPU: a function of (key, position, count) only.

        The same bits for any number of threads: chunks are cut by position, not by thread.
        """
        assert count >= 0 and threads >= 1
        total = count + count % 2
        out = torch.empty(total, dtype=torch.float64, device="cpu")
        chunks = range(0, total, _CHUNK)
        workers = min(threads, len(chunks))
        if workers <= 1:
            self._fill_normals(out, self.position, chunks)
        else:
            with ThreadPoolExecutor(workers) as pool:
                shares = [chunks[worker::workers] for worker in range(workers)]
                list(pool.map(lambda share: self._fill_normals(out, self.position, share), shares))
        self.position += _blocks(total * _WORD_BYTES)
        return out[:count]

    def _fill_normals(self, out: Tensor, position: int, starts: Iterable[int]) -> None:
        buffer = _buffer(_CHUNK * _WORD_BYTES)
        words = torch.from_numpy(buffer[: _CHUNK * _WORD_BYTES].view(np.int64))
        scratch = torch.empty(_CHUNK // 2, dtype=torch.float64, device="cpu")
        for start in starts:
            size = min(_CHUNK, out.numel() - start)
            self._encrypt(buffer, size * _WORD_BYTES, position + start * _WORD_BYTES // BLOCK_BYTES)
            normals_from_words_(words[:size], out[start : start + size], scratch[: size // 2])

    def _draw(self, count: int) -> npt.NDArray[np.uint8]:
        assert count >= 0
        buffer = _buffer(count)
        self._encrypt(buffer, count, self.position)
        self.position += _blocks(count)
        return buffer[:count]

    def _encrypt(self, buffer: npt.NDArray[np.uint8], count: int, position: int) -> None:
        counter = modes.CTR(position.to_bytes(BLOCK_BYTES, "big"))
        encryptor = Cipher(algorithms.AES(self._key), counter).encryptor()
        view, zeros = buffer.data, memoryview(_ZEROS)
        for start in range(0, count, len(_ZEROS)):
            written = encryptor.update_into(zeros[: min(len(_ZEROS), count - start)], view[start:])
            assert written == min(len(_ZEROS), count - start)


def _buffer(count: int) -> npt.NDArray[np.uint8]:
    # update_into asks for one block more than it writes
    return np.empty(count + BLOCK_BYTES, dtype=np.uint8)


def _blocks(count: int) -> int:
    return -(-count // BLOCK_BYTES)
