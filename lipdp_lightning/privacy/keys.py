"""Keyed randomness: one secret, one key per purpose, one counter stream per key.

All randomness that touches private data is drawn here, and never from the global generators of torch or
numpy: torch's CPU generator keeps 32 bits of its seed, so keyed draws would repeat each other's noise, and
its fp32 normals never exceed 5.77. Guarantees (docs/guarantee.md, randomness):

* keys: HMAC-SHA256 of an injective encoding of (purpose, indices); two different tuples never share a key;
* streams: AES-256 in counter mode; the bytes at a position depend on (key, position) alone;
* normals: float64, one Box-Muller pair from two 64-bit words (kernels/normals.py), out to 9.34 standard deviations.
"""

from __future__ import annotations

import builtins
import hashlib
import hmac
import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from ..kernels.multilinear import key_table, multilinear_hash
from ..kernels.normals import normals

SECRET_BYTES = 16
KEY_BYTES = 32
BLOCK_BYTES = 16  # one AES block, which is the unit of a stream's position
_WORD_BYTES = 8
_ZEROS = bytes(1 << 20)  # encrypting zeros yields the key stream itself
_SHORT = 1 << 14  # tensors with fewer bytes are hashed directly
_AUTHENTICATED = 1 << 30  # bytes of one authentication code, which must be fewer than 2^31


def new_secret() -> bytes:
    """Returns 128 bits from the operating system; only resume checkpoints may hold them, and no log may."""
    return secrets.token_bytes(SECRET_BYTES)


def derive_key(secret: bytes, purpose: str, *indices: int | bytes) -> bytes:
    """Returns the 32-byte key of (purpose, indices) under the secret, by HMAC-SHA256.

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
    """Returns 32 bytes that name the state a step starts from: names, dtypes, shapes and all bits of tensors.

    As part of the noise key it makes an exact replay of a step repeat its noise (the same release again,
    which costs nothing), and any other continuation draw fresh noise. `context` carries everything else that
    the released sum depends on: plan digest, data fingerprint, world size, code version,
    numeric_environment(). The hash is SHA-256, since current processors compute it faster than blake2b.
    """
    digest = hashlib.sha256()
    for item in context:
        digest.update(_encode_bytes(b"c", item))
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        digest.update(_header(name, tensor))
        digest.update(_bytes_of(tensor))
    return digest.digest()


class PendingDigest:
    """A digest, part of which may still be computed on a device; ``bytes`` of it waits."""

    def __init__(self, parts: Sequence[bytes | Tensor]) -> None:
        self.hashes = [part for part in parts if isinstance(part, Tensor)]
        self._parts, self.value = parts, b""
        if not self.hashes:
            self.complete([])

    def complete(self, hashes: Sequence[bytes]) -> None:
        """Puts hashes in the places of those that are computed on a device."""
        arrived = iter(hashes)
        parts = [part if isinstance(part, bytes) else next(arrived) for part in self._parts]
        self.hashes, self._parts, self.value = [], [], hashlib.sha256(b"".join(parts)).digest()

    def __bytes__(self) -> bytes:
        return digests_of([self])[0]


def digests_of(pending: Sequence[PendingDigest]) -> list[bytes]:
    """Returns the bytes of several digests, for which the host waits once."""
    waiting = [one for one in dict.fromkeys(pending) if one.hashes]
    hashes = [part for one in waiting for part in one.hashes]
    arrived = iter(torch.stack(hashes).cpu() if len(hashes) > 1 else [part.cpu() for part in hashes])
    for one in waiting:
        one.complete([next(arrived).numpy().tobytes() for _ in one.hashes])
    return [one.value for one in pending]


class KeyedDigest:
    """Computes digests of states under a secret key of 32 bytes, in a tenth of the time of ``state_digest``.

    Large tensors on the CPU enter by their GMAC, and those on another device by a hash that is computed there
    (kernels/multilinear.py), of which 32 bytes are copied to the host. Two states that do not depend on the key share a
    digest with probability below 2^-90, for up to 2^34 bytes. Tensors on the CPU whose memory is the same as at the
    call before are read in place.
    """

    def __init__(self, key: bytes) -> None:
        self._code = AESGCM(key)
        self._hash_key = derive_key(key, "multilinear")
        self._tables: dict[torch.device, Tensor] = {}
        self._read: tuple[list[Any], ...] | None = None
        self._alive: list[Tensor] = []
        self._laid: list[tuple[bytes, memoryview]] = []

    def of(self, tensors: Mapping[str, Tensor]) -> bytes:
        """Returns the digest of the tensors' names, dtypes, shapes and bits."""
        return bytes(self.begin(tensors))

    def begin(self, tensors: Mapping[str, Tensor]) -> PendingDigest:
        """Begins a digest of the tensors as they are now; the host does not wait for a device."""
        if not all([tensor.is_cpu for tensor in tensors.values()]):
            return self._of_devices(tensors)
        parts: list[bytes | memoryview] = []
        for number, (header, data) in enumerate(self._places(tensors)):
            parts.append(header)
            if len(data) < _SHORT:
                parts.append(data)
                continue
            for part, start in enumerate(range(0, len(data), _AUTHENTICATED)):
                nonce = number.to_bytes(6, "big") + part.to_bytes(6, "big")
                parts.append(self._code.encrypt(nonce, b"", data[start : start + _AUTHENTICATED]))
        return PendingDigest([b"".join(parts)])

    def forget(self) -> None:
        """Drops the references to the tensors that were read."""
        self._read, self._alive, self._laid = None, [], []

    def _of_devices(self, tensors: Mapping[str, Tensor]) -> PendingDigest:
        """Returns the digest of tensors that are not all on the CPU, by one hash on each device.

        The headers name the device of each tensor, so that two states with the same headers are hashed as words of the
        same length.
        """
        lying: dict[torch.device, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            lying.setdefault(tensor.device, {})[name] = tensor
        parts: list[bytes | Tensor] = []
        for device, own in lying.items():
            parts.append(_encode_bytes(b"d", str(device).encode()))
            parts += [_header(name, tensor) for name, tensor in own.items()]
            parts.append(b"h" + KEY_BYTES.to_bytes(8, "big"))
            parts.append(self.of(own) if device.type == "cpu" else self._hash_on(device, list(own.values())))
        return PendingDigest(parts)

    def _hash_on(self, device: torch.device, tensors: Sequence[Tensor]) -> Tensor:
        if device not in self._tables:
            self._tables[device] = key_table(self._hash_key).to(device)
        return multilinear_hash(tensors, self._tables[device])

    def _places(self, tensors: Mapping[str, Tensor]) -> Sequence[tuple[bytes, memoryview]]:
        """Returns header and bytes of each tensor; the bytes are read in place if its memory has not moved."""
        held = list(tensors.values())
        places = list(tensors), *(list(map(of, held)) for of in _PLACE)
        if places != self._read:
            in_place = all([tensor.is_cpu and _is_plain(tensor) for tensor in held])
            # the tensors are kept alive, so that no other tensor can get the id of one
            self._read, self._alive = places if in_place else None, held
            self._laid = [(_header(name, t), _bytes_of(t)) for name, t in tensors.items()]
        return self._laid


_PLACE = (
    id, Tensor.data_ptr, Tensor.size, Tensor.stride, Tensor.is_conj, Tensor.is_neg, attrgetter("dtype"),
    attrgetter("is_cpu"),
)  # fmt: skip
"""The attributes that determine where the bytes of a tensor lie, and how they are read."""


def _header(name: str, tensor: Tensor) -> bytes:
    """Returns the header that precedes the bytes of a tensor and determines their number."""
    return _encode_bytes(b"n", f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor as they are in memory, since numpy lacks bf16, and -0.0 differs from 0.0."""
    plain = tensor.detach()
    if plain.device.type != "cpu" or not _is_plain(plain):
        plain = plain.resolve_conj().resolve_neg().contiguous().cpu()
    return plain.view(-1).view(torch.uint8).numpy().data


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
