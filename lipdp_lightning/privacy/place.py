"""Which directory a run lives in, so that a copy of it is told from the directory itself."""

from __future__ import annotations

import os
from pathlib import Path

LOCK_FILE = "lock"


def place_of(directory: Path) -> str:
    """Identity of a run directory. A renamed directory keeps it; a copy, or one restored from a backup, has another.

    It consists of the directory's inode and, where a run has locked it, the inode of the lock file and the time at
    which that file was made. File systems set the latter themselves, and neither `cp -a` nor a backup brings it back;
    `chmod` and `chown` of the lock file change it, which costs a run no more than a secret of its own.
    """
    parts = [os.stat(directory).st_ino]
    try:
        lock = os.stat(directory / LOCK_FILE)
    except FileNotFoundError:
        pass
    else:
        parts += [lock.st_ino, lock.st_ctime_ns]
    return ".".join(map(str, parts))
