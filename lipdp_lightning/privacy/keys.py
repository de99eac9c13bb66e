"""One secret, one key for each purpose, and digests that name the state a key belongs to.

All randomness that touches private data comes from these keys, and never from the global generators of torch or
numpy: torch's CPU generator keeps 32 bits of its seed, so keyed draws would repeat each other's noise, and its fp32
normals never exceed 5.77. Normals are drawn from a key by kernels/normals.py, and other words by privacy/streams.py.
"""

from __future__ import annotations

import hashlib
import hmac
import operator
import secrets
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

SECRET_BYTES = 16
KEY_BYTES = 32


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
    message = bytearray(encode_bytes(b"p", purpose.encode()))
    for index in indices:
        message += encode_bytes(b"b", index) if isinstance(index, bytes) else _encode_integer(index)
    return hmac.digest(secret, bytes(message), "sha256")


def encode_bytes(tag: bytes, data: bytes) -> bytes:
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
        digest.update(encode_bytes(b"c", item))
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        digest.update(header_of(name, tensor))
        digest.update(bytes_of(tensor))
    return digest.digest()


def header_of(name: str, tensor: Tensor) -> bytes:
    """Returns the header that precedes the bytes of a tensor and determines their number."""
    return encode_bytes(b"n", f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor as they are in memory, since numpy lacks bf16, and -0.0 differs from 0.0."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    return plain.view(-1).view(torch.uint8).numpy().data
