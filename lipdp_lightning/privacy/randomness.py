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
import operator
import platform
import secrets
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

SECRET_BYTES = 16
KEY_BYTES = 32
BLOCK_BYTES = 16  # one AES block: the unit of a stream's position
_WORD_BYTES = 8
_ZEROS = bytes(1 << 20)  # encrypting zeros yields the key stream itself
# Normals are made in chunks of this many: small enough for the cache, and large enough that threads which take turns
# at Python's lock between two calls of numpy seldom wait for it.
_CHUNK = 1 << 16
_SHORT = 1 << 14  # bytes that are hashed as they are
_AUTHENTICATED = 1 << 30  # bytes of one authentication code, which takes less than 2^31
_LOW_63_BITS = (1 << 63) - 1

Visit = Callable[[int, Tensor], None]


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
    return _digest(tensors, context, lambda number, data: [data])


def keyed_digest(key: bytes, tensors: Mapping[str, Tensor]) -> bytes:
    """The same for those who hold a secret key of 32 bytes, in a tenth of the time: large tensors enter by their GMAC.

    Two states that do not depend on the key share a digest with probability below 2^-90, for up to 2^34 bytes.
    """
    code = AESGCM(key)

    def parts(number: int, data: memoryview) -> Iterable[bytes | memoryview]:
        if data.nbytes < _SHORT:
            yield data
            return
        for part, start in enumerate(range(0, data.nbytes, _AUTHENTICATED)):
            nonce = number.to_bytes(6, "big") + part.to_bytes(6, "big")
            yield code.encrypt(nonce, b"", data[start : start + _AUTHENTICATED])

    return _digest(tensors, (), parts)


def _digest(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    context: Iterable[bytes],
    parts: Callable[[int, memoryview], Iterable[bytes | memoryview]],
) -> bytes:
    digest = hashlib.sha256()
    for item in context:
        digest.update(_encode_bytes(b"c", item))
    for number, (name, tensor) in enumerate(tensors.items() if isinstance(tensors, Mapping) else tensors):
        digest.update(_encode_bytes(b"n", f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode()))
        # as bytes: numpy lacks bf16, and -0.0 differs from 0.0; the header determines the length
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        for part in parts(number, flat.cpu().numpy().data):
            digest.update(part)
    return digest.digest()


@lru_cache(maxsize=1)
def numeric_environment() -> bytes:
    """What decides the last bits of a float64 logarithm or of a sum: torch, numpy and the vector unit.

    A replay on another kind of processor may differ in the last bit, hence is not the same release. Given to
    `state_digest`, it makes such a replay draw fresh noise. numpy picks its logarithm when it is loaded, so that it is
    named by what it returns.
    """
    parts = (torch.__version__, np.__version__, torch.backends.cpu.get_cpu_capability(), platform.machine())
    logarithms = np.log(np.arange(1, 4097) / 4097.0)
    return "|".join(parts).encode() + hashlib.sha256(logarithms.tobytes()).digest()


# sin(pi x / 4) = x P(x^2) for |x| <= 1, highest power first: the minimax polynomial, off by less than 3e-18
_SINE = (6.877360573166326e-12, -1.7571500746983934e-09, 3.133616225433416e-07, -3.657620415891388e-05,
         0.0024903945701888438, -0.08074551218828054, 0.7853981633974483)  # fmt: skip
# the same for x in units of 2^-63: exact, as the scales are powers of two
_SINE_OF_WORD = [c * 2.0 ** (-63 * (13 - 2 * power)) for power, c in enumerate(_SINE)]


def normals_from_words_(words: Tensor, out: Tensor, scratch: Tensor) -> None:
    """Box-Muller: 2h uniform 64-bit words (int64, overwritten) to 2h standard normals in `out` (float64).

    For pair j, u = (low 63 bits of words[j] + 1) / 2^63 lies in (0, 1], so its logarithm is finite, and the
    angle is a = 2 pi words[h + j] / 2^64, in [-pi, pi]. With r = sqrt(-2 ln u), out[j] = r cos(a) and
    out[h + j] = r sin(a). The smallest u is 2^-63: r reaches 9.345, which the true law exceeds with
    probability 1.1e-19. `scratch` has h float64.

    cos(a) and sin(a) come from s = sin(a / 4), whose cosine is sqrt(1 - s^2) without cancellation, by doubling the
    angle twice; they are off by less than 2e-15. With numpy, whose calls cost least on arrays that fit the cache.
    """
    half = words.numel() // 2
    values, integers = out.numpy(), words.numpy()
    radius, sine, cosine = values[:half], values[half:], scratch.numpy()[:half]
    other = integers[:half].view(np.float64)  # free once the radius has its words
    np.bitwise_and(integers[:half], _LOW_63_BITS, out=integers[:half])
    np.copyto(radius, integers[:half], casting="unsafe")
    np.add(radius, 1.0, out=radius)
    np.multiply(radius, 2.0**-63, out=radius)
    np.log(radius, out=radius)
    np.multiply(radius, -2.0, out=radius)
    np.sqrt(radius, out=radius)
    np.copyto(cosine, integers[half:], casting="unsafe")
    np.multiply(cosine, cosine, out=sine)
    np.multiply(sine, _SINE_OF_WORD[0], out=other)
    for coefficient in _SINE_OF_WORD[1:-1]:
        np.add(other, coefficient, out=other)
        np.multiply(other, sine, out=other)
    np.add(other, _SINE_OF_WORD[-1], out=other)
    np.multiply(cosine, other, out=cosine)  # s = sin(a / 4)
    np.multiply(cosine, cosine, out=sine)
    np.subtract(1.0, sine, out=other)
    np.sqrt(other, out=other)
    np.multiply(cosine, other, out=cosine)  # sin(a / 2) / 2
    np.multiply(sine, -8.0, out=sine)
    np.add(sine, 4.0, out=sine)  # 4 cos(a / 2)
    np.multiply(sine, cosine, out=sine)
    np.multiply(cosine, cosine, out=cosine)
    np.multiply(cosine, -8.0, out=cosine)
    np.add(cosine, 1.0, out=cosine)
    np.multiply(sine, radius, out=sine)
    np.multiply(radius, cosine, out=radius)


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

    def normal(self, count: int, threads: int = 1, out: Tensor | None = None) -> Tensor:
        """`count` standard normals, float64 on the CPU: a function of (key, position, count) only.

        The same bits for any number of threads: chunks are cut by position, not by thread. They are written into an
        earlier draw, ``out``, if it is one of the same count.
        """
        assert count >= 0 and threads >= 1
        total = count + count % 2
        whole = None if out is None else out._base if out._base is not None else out
        if whole is None or whole.numel() != total or whole.dtype != torch.float64 or whole.device.type != "cpu":
            whole = torch.empty(total, dtype=torch.float64, device="cpu")
        self._make_normals(total, threads, whole, None)
        return whole[:count]

    def visit_normals(self, count: int, visit: Visit, threads: int = 1) -> None:
        """The same draw, never held as a whole: ``visit(start, piece)`` for every chunk, which is the visitor's until
        it returns. Chunks come in any order, with several threads at once.
        """
        assert count >= 0 and threads >= 1
        self._make_normals(count + count % 2, threads, None, lambda start, piece: visit(start, piece[: count - start]))

    def _make_normals(self, total: int, threads: int, whole: Tensor | None, visit: Visit | None) -> None:
        position, largest = self.position, min(_CHUNK, total)

        def make(starts: Iterable[int]) -> None:
            buffer = _buffer(largest * _WORD_BYTES)
            words = torch.from_numpy(buffer[: largest * _WORD_BYTES].view(np.int64))
            own = torch.empty(largest if whole is None else 0, dtype=torch.float64, device="cpu")
            scratch = torch.empty(largest // 2, dtype=torch.float64, device="cpu")
            for start in starts:
                size = min(_CHUNK, total - start)
                piece = own[:size] if whole is None else whole[start : start + size]
                self._encrypt(buffer, size * _WORD_BYTES, position + start * _WORD_BYTES // BLOCK_BYTES)
                normals_from_words_(words[:size], piece, scratch[: size // 2])
                if visit is not None:
                    visit(start, piece)

        chunks = range(0, total, _CHUNK)
        workers = min(threads, len(chunks))
        if workers <= 1:
            make(chunks)
        else:
            with ThreadPoolExecutor(workers) as pool:
                list(pool.map(make, [chunks[worker::workers] for worker in range(workers)]))
        self.position += _blocks(total * _WORD_BYTES)

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
