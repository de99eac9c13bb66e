"""Checkpoint files: readable by their owner alone, complete or not there, sealed, and read without running code.

A checkpoint is a ZIP archive. An authentication code is appended as the archive's comment, so that `torch.load` opens
the file as before. It is an HMAC-SHA256 of every byte before it, under a key that is derived from the run's secret and
stands beside it: a file can be checked before anything in it is parsed, and the key is compared with the secret that
the content states. The key cannot be turned back into the secret.

The code notices a flipped bit, a truncated file and a content that was edited without it. It does not stop somebody who
can read and write the file: the secret is in it, and another content can be sealed. Keep directories with resume
checkpoints to yourself.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import re
import struct
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from torch import nn

from ..files import OWNER_ONLY, read_bytes, write_bytes_atomically
from ..privacy.keys import derive_key

# exact types: a subclass would be rebuilt by its own code
_LEAVES = (
    type(None), bool, int, float, complex, str, bytes, bytearray, torch.Tensor, nn.Parameter, torch.Size, torch.dtype,
    torch.device,
)  # fmt: skip
_LISTS = (list, tuple, set)
_MAPPINGS = (dict, OrderedDict)


def strangers(value: Any, name: str = "") -> Iterator[str]:
    """Yields the place and the class of every value in nested containers that is not plain."""
    kind = type(value)
    if kind in _MAPPINGS:
        for key, item in value.items():
            yield from strangers(key, f"a key of {name or 'it'}")
            yield from strangers(item, f"{name}.{_short(key)}" if name else _short(key))
    elif kind in _LISTS:
        for index, item in enumerate(value):
            yield from strangers(item, f"{name}.{index}")
    elif kind not in _LEAVES:
        yield f"{name} is a {kind.__module__}.{kind.__qualname__}"


def check_plain(content: dict[str, Any]) -> None:
    """Refuses values that could only be read back by running code, and names their places."""
    found = list(strangers(content))
    if found:
        more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        raise ValueError(
            f"the checkpoint cannot be written: {'; '.join(found[:5])}{more}. Reading such values back runs code that "
            "the file names, so checkpoints hold numbers, strings, tensors, and lists and dictionaries of them. "
            "HINT: convert the values in the state_dict() of that callback, optimizer or scheduler (a numpy number by "
            "float(), an array by torch.from_numpy), or leave them out of save_hyperparameters()."
        )


def _short(key: Any) -> str:
    return str(key)[:80] if type(key) in (str, int) else type(key).__name__


_MAGIC = b"\nlipdp checkpoint 2\n"
_DIGEST = 32
_TRAILER = len(_MAGIC) + 2 * _DIGEST
_END_OF_ARCHIVE = b"PK\x05\x06"
_NO_COMMENT = b"\x00\x00"


class Unsealed(ValueError):
    """Raised if there is no authentication code at the end of the content."""


class Damaged(ValueError):
    """Raised if the content is not the one that was sealed."""


def seal(archive: bytes, secret: bytes) -> bytes:
    """Returns the archive with its authentication code; ``secret`` is empty if the content holds none."""
    assert archive[-22:-18] == _END_OF_ARCHIVE and archive[-2:] == _NO_COMMENT, "not an archive as torch writes them"
    key = key_of(secret)
    covered = archive[:-2] + struct.pack("<H", _TRAILER) + _MAGIC + key
    return covered + hmac.digest(key, covered, hashlib.sha256)


def opened(content: bytes) -> bytes:
    """Checks the code of a sealed archive, and returns the key with which it was sealed.

    Raises:
        Unsealed: If there is no code.
        Damaged: If the code does not fit the content.
    """
    covered, code = content[:-_DIGEST], content[-_DIGEST:]
    if covered[-_DIGEST - len(_MAGIC) : -_DIGEST] != _MAGIC:
        raise Unsealed("it has no authentication code at its end")
    key = covered[-_DIGEST:]
    if not hmac.compare_digest(hmac.digest(key, covered, hashlib.sha256), code):
        raise Damaged("its authentication code is not that of its content")
    return key


def key_of(secret: bytes) -> bytes:
    """Returns the key that seals a content with this secret."""
    return derive_key(hashlib.sha256(secret).digest(), "checkpoint")


_RESTORE = "HINT: restore the file from a backup, or start a new run with another --run_dir."


class OwnerOnlyCheckpointIO(TorchCheckpointIO):
    """Writes and reads every checkpoint of a private run.

    Local files get mode 0600 before their first byte is written: a checkpoint to resume from holds the secret. The
    content goes to a temporary name in the same directory, is flushed to the disk and renamed over the target.
    (Lightning's own writer passes through the system's temporary directory.) Paths with a protocol, such as s3://,
    are written by Lightning's file systems, with the same content.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes a checkpoint, whole or not at all."""
        if storage_options is not None:
            raise ValueError(
                "storage_options are not supported. HINT: call trainer.save_checkpoint(path) without them."
            )
        content = pack(checkpoint)
        if not _is_remote(path):
            write_bytes_atomically(path, content, OWNER_ONLY)
            return
        system = get_filesystem(path)
        with system.transaction, system.open(str(path), "wb") as file:
            file.write(content)

    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, loc: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Returns the content; ``weights_only`` is ignored, since only plain values are ever read."""
        return read_checkpoint(path)


def pack(checkpoint: dict[str, Any]) -> bytes:
    """Returns a checkpoint as the bytes of a file; raises ValueError if a value is not plain."""
    check_plain(checkpoint)
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    return seal(buffer.getvalue(), _secret(checkpoint))


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Returns a checkpoint's content, on the CPU.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged, is not sealed, or holds anything but plain values and a model. Nothing of a
            damaged file is parsed, and no code that a file names is run.
    """
    try:
        data = _bytes_of(path)
        key = opened(data)
    except FileNotFoundError:
        raise
    except Unsealed as error:
        raise ValueError(
            f"the checkpoint {path} cannot be read, it is truncated or damaged, or it was written by another program "
            f"or an earlier version of this one: {error}. {_RESTORE}"
        ) from error
    except (Damaged, ValueError, OSError) as error:
        raise ValueError(
            f"the checkpoint {path} cannot be read, it is truncated or damaged ({error}). {_RESTORE}"
        ) from error
    content = _parsed(data, path)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(f"the checkpoint {path} holds no model. {_RESTORE}")
    if key != key_of(_secret(content)):
        raise ValueError(f"the checkpoint {path} was sealed for another run than its content states. {_RESTORE}")
    return content


def _parsed(data: bytes, path: str | Path) -> Any:
    try:
        return parsed_archive(io.BytesIO(data))
    except ValueError as error:
        raise ValueError(f"the checkpoint {path} cannot be used: {error}. {_RESTORE}") from error


def parsed_archive(file: io.BytesIO) -> Any:
    """Returns the plain values in an archive of torch, on the CPU; raises ValueError if it holds anything else."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler can raise almost anything
        named = re.search(r"(?:GLOBAL|global|type) [`']?([\w.]+\.[\w.]+)", str(error))
        asks = f"asks for {named[1]}" if named else "is not an archive of plain values"
        raise ValueError(
            f"it {asks}; only numbers, strings, tensors and containers of them are read, and nothing of it was run"
        ) from error
    if found := next(strangers(content), None):
        raise ValueError(f"it holds values that are not plain: {found}")
    return content


def _bytes_of(path: str | Path) -> bytes:
    if not _is_remote(path):
        return read_bytes(Path(path))
    with get_filesystem(path).open(str(path), "rb") as file:
        return bytes(file.read())


def _is_remote(path: Any) -> bool:
    return "://" in str(path)


def _secret(checkpoint: dict[str, Any]) -> bytes:
    privacy = checkpoint.get("lipdp")
    secret = privacy.get("secret") if isinstance(privacy, dict) else None
    return secret if isinstance(secret, bytes) else b""
