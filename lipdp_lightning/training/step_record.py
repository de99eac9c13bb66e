"""What each step was released from, so that a replay that is not the same release is caught before it happens."""

from __future__ import annotations

import os
import re
from io import FileIO
from pathlib import Path

from ..files import flush_directory, naming, read_bytes
from ..privacy.keys import derive_key

_LINE = re.compile(r"^([0-9a-f]{16}) (\d+) ([0-9a-f]{32})$")
_DIVERGED = "diverged"
# what a death in the middle of a line leaves of it; a power failure may leave zeros
_FRAGMENT = re.compile(r"^(\0*|[0-9a-f]{0,16}|[0-9a-f]{16} \d*|[0-9a-f]{16} \d+ [0-9a-f]{0,32}|[diverg]*)\0*$")
_DIVERGENCE = re.compile(r"^diverged( [0-9a-f]{0,16}( \d*)?)?\0*$")


def _owners_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class StepRecord:
    """One line per step: branch, step, and a keyed digest of what the step is released from.

    A replay with the same secret draws the same Poisson sample. It costs nothing only if the release is the
    same to the last bit; with other noise, the second release on one sample is not what the ledger counts. So
    :meth:`take` is called before the release, and raises where a step that is on record starts from
    another state, or has another sum. The branch is then marked: the next start, and every later one, continues from
    the checkpoint with a new secret.

    Norms are kept by cheap updates that depend on when they were last exact; a checkpoint therefore holds what
    they were last exact at.

    Lines are flushed to the operating system and survive the process's death; they are flushed to the disk before
    a checkpoint is written, so that every step before a checkpoint is on record. The digests are keyed by the secret
    and tell nothing without it; whoever has the secret can subtract the noise anyway. The file is its owner's alone,
    like the checkpoint that holds the secret.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[tuple[str, int], str] = {}
        self._torn = False
        self._file: FileIO | None = None
        self.divergences = 0
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            text = read_bytes(path).decode("utf-8")
        except (OSError, ValueError) as error:
            raise _damaged(path, str(error)) from error
        self._torn = bool(text) and not text.endswith("\n")  # a torn last line: its step was not released
        for number, line in enumerate(text.split("\n"), 1):
            if found := _LINE.match(line):
                self._known[found[1], int(found[2])] = found[3]
            elif _DIVERGENCE.match(line):
                self.divergences += 1
            elif not _FRAGMENT.match(line):
                raise _damaged(path, f"line {number} is none that a run writes")

    def require(self, branch: str, steps: range) -> None:
        """Refuse a record that lacks steps which the branch has taken before its checkpoint was written."""
        missing = [step for step in steps if (branch, step) not in self._known]
        if self._path is None or not missing:
            return
        there = f"lacks {len(missing)} of them, step {missing[0]} the first" if self._path.exists() else "is missing"
        raise _damaged(self._path, f"{len(steps)} steps were taken before the checkpoint, and the record {there}")

    def take(self, branch: str, step: int, digest: str) -> None:
        """Put a step on record before its release, or check it against what is there."""
        known = self._known.get((branch, step))
        if known == digest:
            return
        if known is not None:
            self._write(f"{_DIVERGED} {branch} {step}")
            self.divergences += 1
            raise ValueError(
                f"step {step} of this run was released before, and repeating it here does not give the same numbers: "
                "a second release on the same sample would not be covered by the ledger. The code or what it reads has "
                "changed since, or software, hardware or a callback is not deterministic. HINT: run the same command "
                "again; it continues from the last checkpoint with a new secret, and the ledger counts both branches."
            )
        self._write(f"{branch} {step} {digest}")
        self._known[branch, step] = digest

    def _write(self, line: str) -> None:
        if self._path is None:
            return
        with naming(self._path, "The step was not taken, and the last checkpoint is whole."):
            if self._file is None:  # it stays open: opening it takes longer than the rest of a step's record
                self._file = open(self._path, "ab", buffering=0, opener=_owners_alone)  # noqa: SIM115
            left, self._torn = f"{self._torn * chr(10)}{line}\n".encode(), True
            while left:  # no buffer: what could not be written must not be written by a later attempt
                left = left[self._file.write(left) :]
            self._torn = False

    def flush(self) -> None:
        """Flush the lines to the disk."""
        if self._file is not None and self._path is not None:
            with naming(self._path, "The last checkpoint is whole."):
                os.fsync(self._file.fileno())
            flush_directory(self._path.parent)

    def close(self) -> None:
        """The next line opens the file again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def name_on_record(secret: bytes) -> str:
    """How the steps that were released with a secret are called in the record."""
    return derive_key(secret, "branch on record")[:8].hex()


def _damaged(path: Path, problem: str) -> ValueError:
    return ValueError(
        f"{path}: the record of steps cannot be relied on: {problem}. Without it, a step that is repeated with other "
        "numbers would not be noticed. HINT: restore it from a backup, or start a new run with another --run_dir."
    )
