"""The ledger of branches: it keeps which steps were released under which secret, so that every release counts.

Replaying a step with the same secret from the same state releases the same numbers again and costs nothing.
Any other continuation is a new branch with a new secret, and the steps of both branches count. A branch
reserves steps on disk before it takes them, so that the record never misses a step after a crash.

The caller checks that a replay releases the same bits (training/step_record.py): a different release on the same
Poisson sample would not be counted here.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..files import read_json, write_bytes_atomically
from .keys import derive_key

FORMAT = 2  # the format of the file
LOCK_FILE = "lock"
RESERVED_AT_ONCE = 50  # the most steps that a changed resume after a crash may count in excess


@dataclass
class Branch:
    """Records that steps [start, reached) may have been released with the secret whose fingerprint is ``id``."""

    id: str
    start: int
    reached: int


@dataclass(frozen=True)
class ResumeState:
    """The state of the budget in a resume checkpoint. It holds the secret and must never be released."""

    secret: bytes
    context: bytes
    plan: str
    directory: str | None
    step: int
    branches: tuple[Branch, ...]
    mechanism: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> ResumeState:
        """Returns the state of :meth:`to_dict`; raises ValueError if fields or branches are not valid."""
        try:
            return cls(**{**saved, "branches": tuple(_branch(b) for b in saved["branches"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(error) from error

    def checked(self) -> ResumeState:
        """Returns this state; raises ValueError if a value has another type than this library writes."""
        kinds = (bytes, bytes, str, str | None, int, tuple, dict)
        values = (self.secret, self.context, self.plan, self.directory, self.step, self.branches, self.mechanism)
        wrong = [f"{value!r:.40}" for value, kind in zip(values, kinds, strict=True) if not isinstance(value, kind)]
        if wrong:
            raise _unreadable(f"{wrong[0]} has another type")
        return self


def _unreadable(reason: object) -> ValueError:
    return ValueError(
        f"the checkpoint's state of the budget cannot be read ({reason}). HINT: restore the checkpoint from a backup, "
        "or start a new run."
    )


class Branches:
    """The branches of one run, kept in the file ``path``, or in checkpoints alone if there is no run directory."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known, self._recorded_plan, self.copied = _read(path)
        self._current: Branch | None = None
        self._before = 0
        self._plan = ""
        self._planned_steps = 0
        self.secret = b""
        self.context = b""
        self.secret_fixed = False

    def open(
        self, restored: ResumeState | None, context: bytes, plan: str, planned_steps: int, secret: bytes, fixed: bool
    ) -> None:
        """Continues a branch, or starts one.

        Args:
            restored: The state in the checkpoint that the run continues from, if any.
            context: A digest of all that decides a step besides the weights; another one starts a new branch.
            plan: The digest of the plan.
            planned_steps: The plan's number of steps.
            secret: A fresh secret, which only a new branch uses.
            fixed: Whether the secret was fixed, for tests.

        Raises:
            ValueError: If the plan is another one, its steps are spent, or the record is not complete.
        """
        self._plan, self._planned_steps, self.context, self.secret_fixed = plan, planned_steps, context, fixed
        for owner, found in (
            ("checkpoint", restored and restored.plan),
            ("record of released steps", self._recorded_plan),
        ):
            if found and found != plan:
                raise ValueError(
                    f"the {owner} belongs to another privacy plan; continuing it under this one would spend a budget "
                    "that nobody accounts for. HINT: resume with the plan of the run, or start a new run directory."
                )
        self._recorded_plan = plan
        self.copied |= restored is not None and restored.directory not in (None, self._directory())
        self._merge(restored)
        start = restored.step if restored is not None else 0
        same = restored is not None and restored.context == context and restored.directory == self._directory()
        self.secret = restored.secret if restored is not None and same else self._unused(secret)
        branch = self._find(_name(self.secret, context))
        if branch is None:
            branch = Branch(_name(self.secret, context), start, start)
            self._known.append(branch)
        self._current, self._before = branch, branch.reached
        if self.limit() <= start < planned_steps:
            raise ValueError(
                f"the plan's {planned_steps} steps are spent: other branches of this run took "
                f"{self.spent(start) - start} steps that count, and this one starts at step {start}. "
                "HINT: start a new run with a budget of its own; a resume on the same data, world size and software "
                "repeats its noise and costs nothing."
            )
        self._write()  # before any checkpoint names the branch, so that a branch without a record shows a loss

    def taken_here(self, restored: ResumeState) -> range:
        """Returns the steps that a checkpoint's branch has taken in this directory, as far as that is certain.

        It has taken the steps before the checkpoint, and those of all reservations but the last, since the first step
        beyond a reservation writes the next one.
        """
        if not self.is_here(restored):
            return range(0)
        name = _name(restored.secret, restored.context)
        start = next((b.start for b in restored.branches if b.id == name), restored.step)
        return range(start, max(restored.step, self.reserved_here(restored) - RESERVED_AT_ONCE))

    def reserved_here(self, restored: ResumeState) -> int:
        """Returns the step up to which a checkpoint's branch has reserved steps in this directory."""
        known = self._find(_name(restored.secret, restored.context)) if self.is_here(restored) else None
        return restored.step if known is None else known.reached

    def is_here(self, restored: ResumeState) -> bool:
        """Returns whether a checkpoint was written in this run's directory, and not in one it was copied from."""
        return restored.directory is not None and restored.directory == self._directory()

    def _find(self, name: str) -> Branch | None:
        return next((b for b in self._known if b.id == name), None)

    def _unused(self, secret: bytes) -> bytes:
        """Returns a secret that no other branch has: a fixed one, given every time, would repeat the samples."""
        return derive_key(secret, "branch", len(self._known))[: len(secret)] if self._known else secret

    def _merge(self, restored: ResumeState | None) -> None:
        """Adds the branches that the checkpoint knows and the record does not."""
        for branch in restored.branches if restored is not None else ():
            known = self._find(branch.id)
            if known is None:
                assert restored is not None
                self._known.append(replace(branch, reached=self._reached_at_most(branch, restored.directory)))
            else:
                known.start, known.reached = min(known.start, branch.start), max(known.reached, branch.reached)

    def _reached_at_most(self, branch: Branch, directory: str | None) -> int:
        """Returns how far a branch may have gone after the checkpoint, which is from ``directory``."""
        if directory is None:
            return max(branch.reached, self._planned_steps)  # no other record exists
        if directory != self._directory():
            return branch.reached  # the record of that directory holds the other steps
        raise ValueError(
            f"{self._path}: the record of released steps is missing, or older than the checkpoint. HINT: restore it "
            "from a backup; without it nobody knows what this run has spent."
        )

    def reserve(self, step: int) -> None:
        """Records that ``step`` may be released, before it is; raises ValueError if it is not in the budget."""
        assert self._current is not None
        if step >= max(self.limit(), self._before):
            raise ValueError(
                f"step {step} is not in the budget: the plan's {self._planned_steps} steps are spent. "
                "HINT: end training at Branches.limit(), as PrivateStrategy does."
            )
        if step >= self._current.reached:
            self._current.reached = min(step + RESERVED_AT_ONCE, max(step + 1, self.limit()))
            self._write()

    def finish(self, step: int) -> None:
        """Records that the run ended before ``step``, so that later steps which were reserved were not taken."""
        assert self._current is not None
        self._current.reached = max(step, min(self._before, self._current.reached))
        self._write()

    def spent(self, step: int) -> int:
        """Returns the number of steps that count when the run is at ``step``: its own and those of other branches."""
        assert self._current is not None
        return self._of_others() + max(step, self._before) - self._current.start

    def limit(self) -> int:
        """Returns the step at which the planned number of steps is spent."""
        assert self._current is not None
        return self._planned_steps - self._of_others() + self._current.start

    def _of_others(self) -> int:
        return sum(b.reached - b.start for b in self._known if b is not self._current)

    def state(self, step: int, mechanism: dict[str, float]) -> ResumeState:
        known = tuple(replace(b) for b in self._known)
        return ResumeState(self.secret, self.context, self._plan, self._directory(), step, known, mechanism)

    @property
    def count(self) -> int:
        return len(self._known)

    def _directory(self) -> str | None:
        """Returns the identity of the run directory; a copy of it has another."""
        return None if self._path is None else place_of(self._path.parent)

    def _write(self) -> None:
        if self._path is None:
            return
        branches = [asdict(b) for b in self._known]
        record = {"format": FORMAT, "plan": self._plan, "copied": self.copied, "branches": branches}
        write_bytes_atomically(self._path, json.dumps(record, indent=1).encode())


def place_of(directory: Path) -> str:
    """Returns the identity of a run directory; a renamed one keeps it, a copy or a restored backup has another.

    It consists of the directory's inode and, if a run has locked it, the lock file's inode and change time. File
    systems set that time themselves, and neither `cp -a` nor a backup restores it. `chmod` and `chown` of the lock file
    change it, too, and the run then continues with a new secret.
    """
    parts = [os.stat(directory).st_ino]
    try:
        lock = os.stat(directory / LOCK_FILE)
    except FileNotFoundError:
        pass
    else:
        parts += [lock.st_ino, lock.st_ctime_ns]
    return ".".join(map(str, parts))


def _name(secret: bytes, context: bytes) -> str:
    return hashlib.sha256(b"branch" + secret + context).hexdigest()[:16]


def _branch(saved: dict[str, Any]) -> Branch:
    branch = Branch(**saved)
    if not isinstance(branch.id, str) or any(type(n) is not int for n in (branch.start, branch.reached)):
        raise ValueError(f"{branch} is not a record")
    if not 0 <= branch.start <= branch.reached:
        raise ValueError(f"{branch} contradicts itself")
    return branch


def _read(path: Path | None) -> tuple[list[Branch], str, bool]:
    """Returns the branches on disk, the digest of their plan, and whether they were copied from elsewhere."""
    if path is None or not path.exists():
        return [], "", False
    try:
        saved = read_json(path)
        if saved.get("format", FORMAT) != FORMAT:
            raise ValueError(f"it has format {saved['format']!r}, and this version reads {FORMAT}")
        branches = [_branch(b) for b in saved["branches"]]
        for branch in branches:
            if sum(b.id == branch.id for b in branches) > 1:
                raise ValueError(f"{branch} contradicts another")
        return branches, str(saved.get("plan", "")), bool(saved.get("copied"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: the record of released steps cannot be read ({error}). HINT: restore it from a backup; without "
            "it nobody knows what this run has spent."
        ) from error
