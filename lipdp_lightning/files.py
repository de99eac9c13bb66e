"""Writes files that are complete or absent, names them in errors, and reads files that others may have written.

Every writer of the project ends here. A file is written under a temporary name in its own directory, flushed to the
disk, and renamed over the target; then the directory is flushed. A reader, or a job killed at any moment, finds the old
file or the new one, never a part of one.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

OWNER_ONLY = 0o600
EVERYONE = 0o666  # minus the user's umask
LARGEST_TEXT = 1 << 26  # bytes; every text file that this project writes is far smaller

AGAIN = "then run the same command again"

_LEFT_OVER = re.compile(r"^\..+\.\d+\.[0-9a-f]{8,12}\.(tmp|part)$")
_HINTS = {
    errno.ENOSPC: "make room on its file system",
    errno.EDQUOT: "make room in the quota of its file system",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EACCES: "make it writable for this user, or name another place",
    errno.EPERM: "make it writable for this user, or name another place",
    errno.EROFS: "its file system is read-only; name another place",
}


class FileNotWritten(OSError):
    """A file could not be written; the message names it and says what is still intact."""

    def __str__(self) -> str:
        return str(self.args[-1])


@contextmanager
def naming(path: str | Path, safe: str = "What was there before is unchanged.") -> Iterator[None]:
    """Turns the operating system's error inside the block into one that names ``path`` and says what is
    still intact.
    """
    try:
        yield
    except FileNotWritten:
        raise
    except OSError as error:
        raise not_written(path, error, safe) from error


def not_written(path: str | Path, error: OSError, safe: str) -> FileNotWritten:
    """Returns the error that names ``path`` and says what is still intact, for one of the operating system."""
    reason = os.strerror(error.errno) if error.errno is not None else str(error)
    fix = _HINTS.get(error.errno or 0, "look at the place it is to be written to")
    message = f"{path} cannot be written: {reason}. {safe} HINT: {fix}, {AGAIN}."
    return FileNotWritten(error.errno, message)


def is_of_a_write(error: OSError) -> bool:
    """Returns whether the operating system refused to write, for want of room or permission."""
    return error.errno in _HINTS


def temporary_name(path: Path) -> Path:
    """Returns a name beside ``path`` that no other process uses and that :func:`remove_left_overs` recognises."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(6)}.tmp")


def open_new(path: Path, mode: int = EVERYONE) -> int:
    """Returns a descriptor of a file that did not exist, which has its permissions from the first byte on."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def flush_directory(directory: Path) -> None:
    """Flushes the names in a directory; otherwise a power failure may bring back a file that was replaced."""
    with suppress(OSError):  # some file systems cannot open or flush a directory, but the rename is atomic even there
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_bytes_atomically(path: str | Path, content: bytes, mode: int = EVERYONE) -> Path:
    """Replaces ``path`` by one rename, and leaves nothing behind if that fails.

    Raises:
        FileNotWritten: if the disk is full, the file too large or the place not writable.
    """
    target = Path(path)
    temporary = temporary_name(target)
    with naming(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(open_new(temporary, mode), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    flush_directory(target.parent)
    return target


def remove_left_overs(directory: Path) -> None:
    """Removes the temporary files of killed writers; the caller holds the directory's lock."""
    with suppress(OSError):
        for entry in list(directory.iterdir()):
            if _LEFT_OVER.match(entry.name) and not entry.is_dir():
                with suppress(OSError):
                    entry.unlink()


def is_left_over(name: str) -> bool:
    """Returns whether a file of that name was left behind by a killed writer."""
    return _LEFT_OVER.match(name) is not None


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """Returns the content of a regular file.

    Raises:
        OSError: if there is no such file or it cannot be read.
        ValueError: if it is a directory, a pipe or a device, which might never end, or is larger than ``most``.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if most is not None and found.st_size > most:
            raise ValueError(f"{path} has {found.st_size} bytes, more than {most}")
        return file.read()


def read_text(path: Path) -> str:
    """Returns the content of a UTF-8 text file; raises ValueError or OSError as :func:`read_bytes` does."""
    return read_bytes(path, LARGEST_TEXT).decode("utf-8")


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file; raises ValueError or OSError as :func:`read_bytes` does, at any depth of
    nesting.
    """
    try:
        return json.loads(read_text(path))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
