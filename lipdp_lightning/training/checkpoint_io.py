"""Checkpoint files that only their owner can read, and that are complete or not there."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO


class OwnerOnlyCheckpointIO(TorchCheckpointIO):
    """Local files get mode 0600 before their first byte is written: a checkpoint to resume from holds the secret.

    The content goes to a temporary name in the same directory, is flushed to the disk and renamed over the
    target. (Lightning's own writer passes through the system's temporary directory.) Paths with a protocol,
    such as s3://, are left to Lightning.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
        try:
            with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def read_checkpoint(path: Path, weights_only: bool = False) -> dict[str, Any]:
    """A checkpoint's content; ValueError if the file is not one, whatever torch says about it."""
    hint = "HINT: restore the file from a backup, or start a new run with another --run_dir."
    try:
        content = torch.load(path, map_location="cpu", weights_only=weights_only)
    except FileNotFoundError:
        raise
    except Exception as error:  # unpickling damaged bytes can raise almost anything
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise ValueError(
            f"the checkpoint {path} cannot be read, it is truncated or damaged ({reason}). {hint}"
        ) from error
    if not isinstance(content, dict) or "state_dict" not in content:
        raise ValueError(f"the checkpoint {path} holds no model. {hint}")
    return content
