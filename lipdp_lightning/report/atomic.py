"""Files that are either complete or not there.

A file is written under a temporary name in its own directory, flushed to the disk, and renamed over the
target. A reader, or a job killed at any moment, finds the old file or the new one, never a part of one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

__all__ = ["atomic_writer", "write_all_atomically", "write_atomically"]


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(6)}.tmp")


def _open_new(path: Path) -> TextIO:
    # os.open, and not tempfile: the file gets the permissions of the user's umask instead of 0600.
    # A character that UTF-8 cannot hold (a file name's undecodable byte) must not lose a report.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    return open(descriptor, "w", encoding="utf-8", errors="backslashreplace", newline="\n")


def _flush_directory(directory: Path) -> None:
    # Some file systems cannot open or flush a directory: the rename is atomic all the same.
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def atomic_writer(path: str | Path) -> Iterator[TextIO]:
    """A text stream whose content becomes ``path`` when the block ends, and vanishes if it raises."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(target)
    try:
        with _open_new(temporary) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_directory(target.parent)


def write_atomically(path: str | Path, content: str) -> Path:
    """Write ``content`` to ``path`` in one rename."""
    with atomic_writer(path) as stream:
        stream.write(content)
    return Path(path)


def write_all_atomically(directory: str | Path, contents: Mapping[str, str]) -> dict[str, Path]:
    """Write several files of one directory; no target is touched before all of them are on the disk.

    A full disk or a bad name therefore leaves the old set of files, not a mixture of old and new ones.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    targets = {name: root / name for name in contents}
    temporaries: dict[str, Path] = {}
    try:
        for name, content in contents.items():
            temporaries[name] = _temporary_name(targets[name])
            with _open_new(temporaries[name]) as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
        for name, target in targets.items():
            os.replace(temporaries.pop(name), target)
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)
    _flush_directory(root)
    return targets
