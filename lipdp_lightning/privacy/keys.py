"""One secret, and one key for each purpose.

All randomness that touches private data comes from these keys, and never from the global generators of torch or
numpy: torch's CPU generator keeps 32 bits of its seed, so keyed draws would repeat each other's noise, and its fp32
normals never exceed 5.77. Normals are drawn from a key by kernels/normals.py, and other words by key_streams.py.
"""

from __future__ import annotations

import hmac
import operator
import secrets

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
