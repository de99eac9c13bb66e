"""The run directory: its files, and checks whether a command may use it."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from ..alive import this_process
from ..files import is_left_over, naming, read_json, read_text, remove_left_overs, write_bytes_atomically
from ..privacy.branches import LOCK_FILE, place_of
from ..run_names import (
    CHECKPOINTS,
    CONFIG_FILE,
    FORMAT,
    LAST,
    LEDGER_FILE,
    PLAN_FILE,
    PROGRESS_FILE,
    RUN_FILE,
    STATISTICS_FILE,
    STEPS_FILE,
)

# the files that claim() writes, in this order, before run.json exists
_FIRST = (LOCK_FILE, CONFIG_FILE, PLAN_FILE, STEPS_FILE)
_WRITTEN_BY_FIT = "HINT: --run_dir names what lipdp fit has written."


class RunDirectory:
    """One directory per run: resolved configuration, plan, ledger of branches, checkpoints, logs and reports.

    Nothing is written before :meth:`claim`. ``run.json`` says whether the run is running, stopped (it may be
    continued) or finished (its plan's steps are spent).
    """

    def __init__(self, path: str | Path) -> None:
        if not str(path):
            raise ValueError("the run directory's name is empty. HINT: name a new directory, such as runs/first.")
        self.path = Path(path)
        self._lock: IO[str] | None = None
        self._fresh_id = secrets.token_hex(4)

    @property
    def ledger(self) -> Path:
        """The ledger of branches."""
        return self.path / LEDGER_FILE

    @property
    def steps(self) -> Path:
        """The record of steps."""
        return self.path / STEPS_FILE

    @property
    def statistics(self) -> Path:
        """The statistics that were released before the first step."""
        return self.path / STATISTICS_FILE

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / CONFIG_FILE

    @property
    def checkpoint(self) -> Path:
        """The checkpoint to continue from."""
        return self.path / CHECKPOINTS / LAST

    @property
    def id(self) -> str:
        """A name for loggers that stays the same when the run is continued."""
        record = self.record()
        return str(record.get("id", self._fresh_id)) if record is not None else self._fresh_id

    def record(self) -> dict[str, Any] | None:
        """Returns the content of run.json, or None if it does not exist."""
        file = self.path / RUN_FILE
        try:
            record = read_json(file)
            if not (isinstance(record, dict) and all(isinstance(record.get(k), str) for k in ("plan", "status"))):
                raise ValueError("plan or status is missing")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, OSError) as error:
            raise ValueError(f"{file} cannot be read ({error}). HINT: restore it, or use another --run_dir.") from error
        if record.get("format") != FORMAT:
            raise ValueError(
                f"{self.path} is a run directory of another version of this package: it has format "
                f"{str(record.get('format'))[:20]}, and this version reads {FORMAT}. HINT: use the version that made "
                "it, or start a new run with another --run_dir."
            )
        return record

    def require(self) -> dict[str, Any]:
        """Returns the record of this user's run; raises ValueError if the path is something else."""
        if not self.path.is_dir():
            what = "is a file" if os.path.lexists(self.path) else "does not exist"
            raise ValueError(f"--run_dir {self.path} is not a run directory: it {what}. {_WRITTEN_BY_FIT}")
        self.check_owner()
        record = self.record()
        if record is None:
            raise ValueError(f"--run_dir {self.path} is not a run directory: {self._instead()}")
        return record

    def check_owner(self) -> None:
        """Refuses a directory that belongs to another user."""
        owner = os.stat(self.path).st_uid
        if owner != os.geteuid():
            raise ValueError(
                f"--run_dir {self.path} belongs to another user (uid {owner}), who decides what is in it. "
                "HINT: look at it, and copy it to a directory of your own."
            )

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except OSError as error:
            raise ValueError(
                f"--run_dir {self.path} cannot be read: {error.strerror}. HINT: make it readable for this user."
            ) from error

    def _instead(self) -> str:
        names = self._names()
        if not names:
            return f"it is empty. {_WRITTEN_BY_FIT}"
        if self._begun(names):
            return "lipdp fit began to make one and did not get to the first step. HINT: run lipdp fit again."
        if {LEDGER_FILE, STEPS_FILE, CHECKPOINTS} & set(names):
            return f"it holds parts of a run, and {RUN_FILE} is missing. HINT: restore it from a backup."
        return f"it holds {', '.join(names[:3])}{' and more' if names[3:] else ''}. {_WRITTEN_BY_FIT}"

    def _begun(self, names: list[str]) -> bool:
        """Returns whether an interrupted :meth:`claim` has left these files, before any step was taken."""
        kept = [name for name in names if not is_left_over(name)]
        if any(name not in _FIRST for name in kept) or (kept and LOCK_FILE not in kept):
            return False
        steps = self.path / STEPS_FILE
        return not steps.exists() or steps.stat().st_size == 0

    def configuration(self) -> str:
        """Returns the text of config.yaml."""
        try:
            return read_text(self.config)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.config} cannot be read ({error}). HINT: restore it from a backup.") from error

    def content(self, name: str) -> dict[str, Any]:
        """Returns the content of one of the JSON files."""
        file = self.path / name
        try:
            content = read_json(file)
            if not isinstance(content, dict):
                raise ValueError("it is no JSON object")
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} cannot be read ({error}). HINT: restore it from a backup.") from error
        return content

    def made_here(self) -> bool:
        """Returns whether the configuration in this directory was written here by this user, and not copied to it."""
        return (self.record() or {}).get("place") == place_of(self.path)

    def check(self, plan_digest: str, plan: Mapping[str, Any]) -> bool:
        """Returns whether to continue an unfinished run of the same plan; refuses what must not be continued.

        Args:
            plan_digest: The digest of the plan.
            plan: Its options, to say in what they differ from the run's.
        """
        if not os.path.lexists(self.path):
            return False
        if not self.path.is_dir():
            raise ValueError(
                f"--run_dir {self.path} exists and is not a run directory. HINT: name a new or empty directory."
            )
        self.check_owner()
        record = self.record()
        if record is None:
            names = self._names()
            if names and not self._begun(names):
                raise ValueError(
                    f"--run_dir {self.path} exists and is not a run directory: {self._instead()} "
                    "A new run takes a new or empty directory."
                )
            return False
        if record["status"] == "finished":
            raise ValueError(
                f"the run in {self.path} is finished; training on would exceed its plan. "
                "HINT: use a new --run_dir, or raise the plan's steps there."
            )
        if record["plan"] != plan_digest:
            raise ValueError(
                f"the run in {self.path} has another privacy plan, and a ledger belongs to one plan"
                f"{self._changes(plan)}. HINT: use a new --run_dir, or the options the run was started with (see its "
                "config.yaml). Where they leave one out, another version may have chosen it otherwise: name the "
                f"scaling, and what has changed, as in {PLAN_FILE}."
            )
        return True

    def _changes(self, plan: Mapping[str, Any]) -> str:
        """Returns the options of a plan that are not those of the run, in words; they are empty if none is known."""
        try:
            before = read_json(self.path / PLAN_FILE)
            changed = [name for name in plan if json.dumps(before.get(name)) != json.dumps(plan[name])]
        except (OSError, ValueError, AttributeError):
            return ""
        told = (f"{name} was {json.dumps(before.get(name))} and is {json.dumps(plan[name])}" for name in changed)
        return f": {text}" if (text := ", ".join(told)) else ""

    def claim(self, plan_digest: str, plan: dict[str, Any], config: str) -> bool:
        """Takes the directory after all other checks, and returns whether an unfinished run is continued.

        One process holds it until it ends. A continued run keeps the configuration with which it was started.

        Args:
            plan_digest: The digest of the plan.
            plan: The plan, for plan.json.
            config: The resolved configuration, for config.yaml.

        Raises:
            ValueError: If the directory must not be used, or another process uses it.
        """
        if self._lock is None:
            self.check(plan_digest, plan)
            with naming(self.path, "Nothing was written."):
                self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
        remove_left_overs(self.path)
        continued = self.check(plan_digest, plan)  # another process may have finished the run meanwhile
        if not continued:  # if the process dies in between, the next claim finds these files: see _begun
            write_bytes_atomically(self.config, config.encode("utf-8", "backslashreplace"))
            write_bytes_atomically(self.path / PLAN_FILE, json.dumps(plan, indent=1).encode())
            write_bytes_atomically(self.steps, b"")
        elif not self.steps.exists():
            raise ValueError(
                f"{self.steps} is missing: without it, a step that is repeated with other numbers would not be "
                "noticed. HINT: restore it from a backup, or start a new run with another --run_dir."
            )
        self.mark("running", plan_digest, process=this_process())
        return continued

    def mark(self, status: str, plan_digest: str, **facts: Any) -> None:
        """Writes the status of the run into run.json; the seconds of training so far stay if none are given."""
        before = self.record() or {}
        place = before.get("place", "") if before else place_of(self.path)
        record = {"format": FORMAT, "status": status, "plan": plan_digest, "id": self.id, "place": place}
        record |= {"seconds": before.get("seconds", 0.0), **facts}
        write_bytes_atomically(self.path / RUN_FILE, json.dumps(record, indent=1).encode())

    def note_progress(self, progress: dict[str, Any]) -> None:
        """Writes how far the run is, for `lipdp status`; the time of the file is a sign of life."""
        write_bytes_atomically(self.path / PROGRESS_FILE, json.dumps(progress, indent=1).encode())

    def release(self) -> None:
        """Lets another process, or another Trainer of this one, take the directory."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        with naming(self.path / LOCK_FILE, "Nothing was written."):
            # the file is not truncated, since its times tell the directory from a copy
            lock = open(self.path / LOCK_FILE, "a")  # noqa: SIM115 - held until the process ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise ValueError(
                f"another process is training in {self.path}. HINT: wait for it, or use another --run_dir."
            ) from error
        self._lock = lock
