"""Digests that name the state of a network, and digests under a secret key, of which each step takes several."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from ..kernels.multilinear import key_table, multilinear_hash
from .keys import derive_key

_SHORT = 1 << 14  # tensors with fewer bytes are hashed directly
_AUTHENTICATED = 1 << 30  # bytes of one authentication code, which must be fewer than 2^31


def state_digest(tensors: Mapping[str, Tensor], *context: bytes) -> bytes:
    """Returns 32 bytes that name the state a step starts from: names, dtypes, shapes and all bits of tensors.

    As part of the noise key it makes an exact replay of a step repeat its noise (the same release again,
    which costs nothing), and any other continuation draw fresh noise. `context` carries everything else that
    the released sum depends on: plan digest, data fingerprint, world size, code version,
    numeric_environment().
    """
    return digest_of(digest_of(*context), _header(tensors), *[_bytes_of(tensor) for tensor in tensors.values()])


def digest_of(*parts: bytes | memoryview) -> bytes:
    """Returns the SHA-256 hash of the parts, each with its length, so that other parts have other hashes.

    Current processors compute SHA-256 faster than blake2b.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Returns names, dtypes and shapes of tensors, which determine how many bytes follow for each of them."""
    described = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
    return repr(described).encode()


def _bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor as they are in memory, in which -0.0 differs from 0.0."""
    plain = tensor.detach()
    try:
        values = plain.numpy()
    except (TypeError, RuntimeError):  # bfloat16, which numpy lacks, tensors on a device, and lazy conjugates
        plain = plain.resolve_conj().resolve_neg().contiguous().cpu()
        values = plain.view(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


class PendingDigest:
    """A digest, part of which may still be computed on a device; ``bytes`` of it waits."""

    def __init__(self, parts: Sequence[bytes | memoryview | Tensor]) -> None:
        self.hashes = [part for part in parts if isinstance(part, Tensor)]
        self._parts, self.value = parts, b""
        if not self.hashes:
            self.complete([])

    def complete(self, hashes: Sequence[bytes]) -> None:
        """Puts hashes in the places of those that are computed on a device."""
        arrived = iter(hashes)
        parts = [next(arrived) if isinstance(part, Tensor) else part for part in self._parts]
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
    digest with probability below 2^-90, for up to 2^34 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._code = AESGCM(key)
        self._hash_key = derive_key(key, "multilinear")
        self._tables: dict[torch.device, Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> bytes:
        """Returns the digest of the tensors' names, devices, dtypes, shapes and bits."""
        return bytes(self.begin(tensors))

    def begin(self, tensors: Mapping[str, Tensor]) -> PendingDigest:
        """Begins a digest of the tensors as they are now; the host does not wait for a device.

        The header of a device's tensors comes before their bits, so that two states with the same header are hashed as
        words of the same length.
        """
        parts: list[bytes | memoryview | Tensor] = []
        for device in dict.fromkeys([tensor.device for tensor in tensors.values()]):
            own = {name: tensor for name, tensor in tensors.items() if tensor.device == device}
            header = _header(own)
            parts.append(f"{device} {len(header)} ".encode() + header)
            bits = list(own.values())
            parts += self._codes(bits) if device.type == "cpu" else [self._hash_on(device, bits)]
        return PendingDigest(parts)

    def _codes(self, tensors: Sequence[Tensor]) -> list[bytes | memoryview]:
        """Returns the bytes of short tensors, and the codes of the parts of large ones, each under its own nonce.

        Short tensors of one dtype are put together, by which a step of a small network takes a tenth fewer calls.
        """
        short = [tensor for tensor in tensors if tensor.nbytes < _SHORT]
        dtypes = dict.fromkeys([tensor.dtype for tensor in short])
        together = [_flatten_dense_tensors([t for t in short if t.dtype == dtype]) for dtype in dtypes]
        codes: list[bytes | memoryview] = [_bytes_of(one) for one in together]
        for number, tensor in enumerate(tensors):
            if tensor.nbytes < _SHORT:
                continue
            data = _bytes_of(tensor)
            for part, start in enumerate(range(0, len(data), _AUTHENTICATED)):
                nonce = number.to_bytes(6, "big") + part.to_bytes(6, "big")
                codes.append(self._code.encrypt(nonce, b"", data[start : start + _AUTHENTICATED]))
        return codes

    def _hash_on(self, device: torch.device, tensors: Sequence[Tensor]) -> Tensor:
        if device not in self._tables:
            self._tables[device] = key_table(self._hash_key).to(device)
        return multilinear_hash(tensors, self._tables[device])
