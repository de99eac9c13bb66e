"""What each step was released from, so that a replay that is not the same release is caught before it happens."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TextIO

_LINE = re.compile(r"^([0-9a-f]{16}) (\d+) ([0-9a-f]{32})$")
_DIVERGED = "diverged"


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

    Lines are flushed to the operating system and survive the process's death. The digests are keyed
    by the secret and tell nothing without it; whoever has the secret can subtract the noise anyway. The file is its
    owner's alone, like the checkpoint that holds the secret.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[tuple[str, int], str] = {}
        self._torn = False
        self._file: TextIO | None = None
        self.divergences = 0
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        text = path.read_text(errors="replace")
        self._torn = bool(text) and not text.endswith("\n")  # a torn last line: its step was not released
        for line in text.splitlines():
            found = _LINE.match(line)
            if line.startswith(_DIVERGED):
                self.divergences += 1
            elif found:
                self._known[found[1], int(found[2])] = found[3]

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
        self._known[branch, step] = digest
        self._write(f"{branch} {step} {digest}")

    def _write(self, line: str) -> None:
        if self._path is None:
            return
        if self._file is None:  # it stays open: opening it takes longer than the rest of a step's record
            self._file = open(self._path, "a", opener=_owners_alone)  # noqa: SIM115
        self._file.write(("\n" if self._torn else "") + line + "\n")
        self._file.flush()
        self._torn = False

    def close(self) -> None:
        """The next line opens the file again."""
        if self._file is not None:
            self._file.close()
            self._file = None
