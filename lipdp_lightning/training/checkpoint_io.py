"""Checkpoint files: readable by their owner alone, complete or not there, sealed, and read without running code."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem

from ..files import OWNER_ONLY, read_bytes, write_bytes_atomically
from .plain import check_plain, strangers
from .sealed import Damaged, Unsealed, key_of, opened, seal

_RESTORE = "HINT: restore the file from a backup, or start a new run with another --run_dir."


class OwnerOnlyCheckpointIO(TorchCheckpointIO):
    """Writes and reads every checkpoint of a private run, whatever Lightning was asked for.

    Local files get mode 0600 before their first byte is written: a checkpoint to resume from holds the secret. The
    content goes to a temporary name in the same directory, is flushed to the disk and renamed over the target.
    (Lightning's own writer passes through the system's temporary directory.) Paths with a protocol, such as s3://,
    are written by Lightning's file systems, with the same content.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise ValueError("storage_options are not supported. HINT: trainer.save_checkpoint(path) without them.")
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
        """The content; ``weights_only`` is disregarded, since nothing but plain values is ever read."""
        return read_checkpoint(path)


def pack(checkpoint: dict[str, Any]) -> bytes:
    """A checkpoint as the bytes of a file; ValueError names what in it is not plain."""
    check_plain(checkpoint)
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    return seal(buffer.getvalue(), _secret(checkpoint))


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint's content, on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, is not sealed, or holds anything but plain values and a model. Nothing of a
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
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler can raise almost anything
        named = re.search(r"(?:GLOBAL|global|type) [`']?([\w.]+\.[\w.]+)", str(error))
        asks = f"asks for {named[1]}" if named else "is no archive of plain values"
        raise ValueError(
            f"the checkpoint {path} {asks}; only numbers, strings, tensors and containers of them are read, and "
            f"nothing of it was run. {_RESTORE}"
        ) from error
    if found := next(strangers(content), None):
        raise ValueError(f"the checkpoint {path} holds values that are not plain: {found}. {_RESTORE}")
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
