"""Writes files that are either complete or absent.

A file is written under a temporary name in its own directory, flushed to the disk, and renamed over the target. A
reader, or a job killed at any moment, finds the old file or the new one, never a part of one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from ..files import flush_directory, naming, open_new, temporary_name

__all__ = ["atomic_writer", "write_all_atomically", "write_atomically"]


def _open_new(path: Path) -> TextIO:
    # The file gets the permissions of the user's umask.
    # A character that UTF-8 cannot hold (a file name's undecodable byte) must not lose a report.
    return open(open_new(path), "w", encoding="utf-8", errors="backslashreplace", newline="\n")


@contextmanager
def atomic_writer(path: str | Path) -> Iterator[TextIO]:
    """Yields a text stream whose content becomes ``path`` when the block ends, and vanishes if it raises."""
    target = Path(path)
    temporary = temporary_name(target)
    with naming(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _open_new(temporary) as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, target)
        except BaseException:
            _forget(temporary)
            raise
    flush_directory(target.parent)


def _forget(temporary: Path) -> None:
    with suppress(OSError):
        temporary.unlink(missing_ok=True)


def write_atomically(path: str | Path, content: str) -> Path:
    """Writes ``content`` to ``path`` in one rename."""
    with atomic_writer(path) as stream:
        stream.write(content)
    return Path(path)


def write_all_atomically(directory: str | Path, contents: Mapping[str, str]) -> dict[str, Path]:
    """Writes several files of one directory; no target is touched before all of them are on the disk.

    A full disk or a bad name therefore leaves the old set of files, not a mixture of old and new ones.
    """
    root = Path(directory)
    with naming(root):
        root.mkdir(parents=True, exist_ok=True)
    targets = {name: root / name for name in contents}
    temporaries: dict[str, Path] = {}
    try:
        for name, content in contents.items():
            temporaries[name] = temporary_name(targets[name])
            with naming(targets[name]), _open_new(temporaries[name]) as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
        for name, target in targets.items():
            with naming(target):
                os.replace(temporaries[name], target)
            del temporaries[name]
    finally:
        for temporary in temporaries.values():
            _forget(temporary)
    flush_directory(root)
    return targets
