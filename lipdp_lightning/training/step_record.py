"""The record of steps: it names what each step was released from, so that a replay with another release is refused."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from ..files import flush_directory, naming, not_written, read_bytes
from ..privacy.keys import derive_key

_LINE = re.compile(r"^([0-9a-f]{16}) (\d+) ([0-9a-f]{32})$")
_DIVERGED = "diverged"
# the part of a line that a killed process may leave; a power failure may leave zeros
_FRAGMENT = re.compile(r"^(\0*|[0-9a-f]{0,16}|[0-9a-f]{16} \d*|[0-9a-f]{16} \d+ [0-9a-f]{0,32}|[diverg]*)\0*$")
_DIVERGENCE = re.compile(r"^diverged( [0-9a-f]{0,16}( \d*)?)?\0*$")
_HALF = 16  # hex digits of a digest, and of its code


@dataclass(frozen=True)
class RecordState:
    """The state of the record in a checkpoint, by which lines that are lost or edited later are found.

    Attributes:
        lines: The number of steps on record, of all branches, when the checkpoint was written.
        last: The code of the last one; empty if there was none.
        boot: Names the boot of the machine that wrote them; empty if it is not known.
    """

    lines: int
    last: str
    boot: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the state as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Any) -> RecordState:
        """Returns the state of :meth:`to_dict`; raises ValueError for other values."""
        kinds = {"lines": int, "last": str, "boot": str}
        if not isinstance(saved, dict) or {name: type(value) for name, value in saved.items()} != kinds:
            raise ValueError(
                "the checkpoint's state of the record of steps cannot be read. HINT: restore the checkpoint from a "
                "backup, or start a new run."
            )
        return cls(**saved)


@dataclass(frozen=True)
class _Entry:
    branch: str
    step: int
    digest: str  # a digest of what the step was released from, and a code over it and the previous line
    before: str  # the third word of the previous line


class StepRecord:
    """Keeps one line per step: branch, step, and 64 bits of a keyed digest of what it was released from, with a code.

    A replay with the same secret draws the same Poisson sample. It costs nothing only if the release has the same
    bits; with other noise, it is a second release on one sample, which the ledger does not count. Hence
    :meth:`take` is called before the release, and raises if a step on record starts from another state now, or has
    another sum. The branch is then marked: the next start, and every later one, continues from the checkpoint with a
    new secret.

    Norms are kept by cheap updates that depend on when they were last exact, so a checkpoint holds the weights at
    which they were.

    The lines form a chain: the code of each line, under a key of the branch's secret, covers the previous line, so that
    edited, exchanged and missing lines are found. A checkpoint holds the number of lines and the last code. The least
    number of lines after it follows from the ledger's reservations, each of which is written when the steps of the
    previous one have been released.

    Lines are passed to the operating system before the release, so they survive the process's death. They are flushed
    to the disk before a checkpoint is written, and not at every step, which would take longer than the step itself. A
    power cut may therefore lose lines since the last checkpoint, but the ledger on the disk still reserves their steps.
    If reserved steps are not on record after a reboot, :meth:`may_lack_steps` returns True, the run continues with a
    new secret, and all reserved steps count as released.

    The digests are keyed by the secret and reveal nothing without it; whoever has the secret can subtract the noise
    anyway, and write another chain. Only the owner can read the file, like the checkpoint that holds the secret.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._entries: list[_Entry] = []
        self._places: dict[tuple[str, int], int] = {}
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
        self._torn = bool(text) and not text.endswith("\n")  # the step of an incomplete last line was not released
        for number, line in enumerate(text.split("\n"), 1):
            if found := _LINE.match(line):
                self._append(found[1], int(found[2]), found[3])
            elif _DIVERGENCE.match(line):
                self.divergences += 1
            elif not _FRAGMENT.match(line):
                raise _damaged(path, f"line {number} is none that a run writes")

    def _append(self, branch: str, step: int, digest: str) -> None:
        self._places[branch, step] = len(self._entries)
        self._entries.append(_Entry(branch, step, digest, self._last))

    @property
    def _last(self) -> str:
        return self._entries[-1].digest if self._entries else ""

    # ---- before the first step

    def state(self) -> RecordState:
        """Returns the state for a checkpoint that is written now."""
        return RecordState(len(self._entries), self._last, boot_id())

    def require(self, branch: str, steps: range, key: bytes = b"", known: RecordState | None = None) -> None:
        """Refuses a record that lacks steps of a branch, or whose lines are not those that the branch wrote.

        Args:
            branch: The name from :func:`name_on_record`.
            steps: The steps that the branch has certainly taken, by the checkpoint and the ledger.
            key: The key of the branch's lines, from :func:`key_of_record`; without it, no code is checked.
            known: The state of this record in the checkpoint.

        Raises:
            ValueError: If the record cannot be relied on.
        """
        if self._path is None:
            return
        missing = [step for step in steps if (branch, step) not in self._places]
        if missing:
            first = f"lacks {len(missing)} of them, step {missing[0]} the first"
            there = first if self._path.exists() else "is missing"
            raise _damaged(self._path, f"{len(steps)} steps were taken, and the record {there}")
        wrong = [e.step for e in self._entries if key and e.branch == branch and not _is_authentic(e, key)]
        if wrong:
            raise _damaged(self._path, f"the line of step {wrong[0]}, or the one before it, was edited or left out")
        if known is None or known.lines == 0:
            return
        there = self._entries[known.lines - 1].digest if known.lines <= len(self._entries) else ""
        if there != known.last:
            reason = f"the checkpoint knows {known.lines} steps, and the record has lost or edited some of them"
            raise _damaged(self._path, reason)

    def may_lack_steps(self, branch: str, reserved: int, known: RecordState | None) -> bool:
        """Returns whether steps of a branch may have been released whose lines a power cut has lost.

        Args:
            branch: The name from :func:`name_on_record`.
            reserved: The step up to which the ledger has reserved steps of the branch.
            known: The state of this record in the checkpoint.
        """
        if self._path is None or known is None or known.boot == boot_id():
            return False  # lines survive the death of the process that has written them
        return reserved > max((e.step + 1 for e in self._entries if e.branch == branch), default=0)

    # ---- in a step

    def take(self, branch: str, step: int, digest: str, key: bytes = b"") -> None:
        """Puts a step on record before its release, or compares it with its line if there is one.

        Args:
            branch: The name from :func:`name_on_record`.
            step: The number of the step that is about to be released.
            digest: 32 hex digits that name what it is released from.
            key: The key from :func:`key_of_record`.

        Raises:
            ValueError: If the record has another release of this step.
            OSError: If the line cannot be written.
        """
        place = self._places.get((branch, step))
        if place is None:
            line = _authenticated(branch, step, digest, self._last, key)
            self._write(f"{branch} {step} {line}")
            self._append(branch, step, line)
        elif self._entries[place].digest[:_HALF] != digest[:_HALF]:
            self._write(f"{_DIVERGED} {branch} {step}")
            self.divergences += 1
            raise ValueError(
                f"step {step} of this run was released before, and repeating it here does not give the same numbers: "
                "a second release on the same sample would not be covered by the ledger. The code or what it reads has "
                "changed since, or software, hardware or a callback is not deterministic. HINT: run the same command "
                "again; it continues from the last checkpoint with a new secret, and the ledger counts both branches."
            )

    def _write(self, line: str) -> None:
        if self._path is None:
            return
        try:
            if self._file is None:  # it stays open, since opening it takes longer than the rest
                self._file = open(self._path, "ab", buffering=0, opener=_owners_alone)  # noqa: SIM115
            left, self._torn = f"{self._torn * chr(10)}{line}\n".encode(), True
            while left:  # there is no buffer, so a later attempt cannot write what this one could not
                left = left[self._file.write(left) :]
        except OSError as error:
            raise not_written(self._path, error, "The step was not taken, and the last checkpoint is whole.") from error
        self._torn = False

    def flush(self) -> None:
        """Flushes the lines to the disk."""
        if self._file is not None and self._path is not None:
            with naming(self._path, "The last checkpoint is whole."):
                os.fsync(self._file.fileno())
            flush_directory(self._path.parent)

    def close(self) -> None:
        """Closes the file; the next line opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def name_on_record(secret: bytes) -> str:
    """Returns the name in the record of the branch with a secret."""
    return derive_key(secret, "branch on record")[:8].hex()


def key_of_record(secret: bytes) -> bytes:
    """Returns the key of the codes of a branch's lines."""
    return derive_key(secret, "codes on record")


def boot_id() -> str:
    """Returns a name of the machine's present boot; it is empty if the system does not provide one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return ""
    return hashlib.sha256(boot.strip()).hexdigest()[:16]


def _authenticated(branch: str, step: int, digest: str, before: str, key: bytes) -> str:
    """Returns half of the digest, and a code over it, its place and the previous line."""
    text = f"{before} {branch} {step} {digest[:_HALF]}"
    return digest[:_HALF] + hmac.digest(key, text.encode(), "sha256").hex()[:_HALF]


def _is_authentic(entry: _Entry, key: bytes) -> bool:
    expected = _authenticated(entry.branch, entry.step, entry.digest, entry.before, key)
    return hmac.compare_digest(expected, entry.digest)


def _owners_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _damaged(path: Path, problem: str) -> ValueError:
    return ValueError(
        f"{path}: the record of steps cannot be relied on: {problem}. Without it, a step that is repeated with other "
        "numbers would not be noticed. HINT: restore it from a backup, or start a new run with another --run_dir."
    )
