"""An authentication code over a whole file, kept where other readers of the file do not look.

A checkpoint is a ZIP archive. The code is appended as the archive's comment, so that `torch.load` opens the file as
before. It is an HMAC-SHA256 of every byte before it, under a key that is derived from the run's secret and stands
beside it: a file can be checked before anything in it is parsed, and the key is compared with the secret that the
content states. The key cannot be turned back into the secret.

What this is good for: a flipped bit, a truncated file and a content that was edited without the code are noticed. What
it is not: the secret is in the same file, so whoever can read and write the file can seal another content. Keep
directories with resume checkpoints to yourself.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from ..privacy.keys import derive_key

_MAGIC = b"\nlipdp checkpoint 2\n"
_DIGEST = 32
_TRAILER = len(_MAGIC) + 2 * _DIGEST
_END_OF_ARCHIVE = b"PK\x05\x06"
_NO_COMMENT = b"\x00\x00"


class Unsealed(ValueError):
    """There is no authentication code at the end of the content."""


class Damaged(ValueError):
    """The content is not what was sealed."""


def seal(archive: bytes, secret: bytes) -> bytes:
    """The archive with its authentication code; ``secret`` is empty where the content holds none."""
    assert archive[-22:-18] == _END_OF_ARCHIVE and archive[-2:] == _NO_COMMENT, "not an archive as torch writes them"
    key = key_of(secret)
    covered = archive[:-2] + struct.pack("<H", _TRAILER) + _MAGIC + key
    return covered + hmac.digest(key, covered, hashlib.sha256)


def opened(content: bytes) -> bytes:
    """Check the code of a sealed archive; returns the key that it was sealed with.

    Raises:
        Unsealed: there is no code.
        Damaged: the code is not that of the content.
    """
    covered, code = content[:-_DIGEST], content[-_DIGEST:]
    if covered[-_DIGEST - len(_MAGIC) : -_DIGEST] != _MAGIC:
        raise Unsealed("it has no authentication code at its end")
    key = covered[-_DIGEST:]
    if not hmac.compare_digest(hmac.digest(key, covered, hashlib.sha256), code):
        raise Damaged("its authentication code is not that of its content")
    return key


def key_of(secret: bytes) -> bytes:
    """The key that a content which states this secret is sealed with."""
    return derive_key(hashlib.sha256(secret).digest(), "checkpoint")
