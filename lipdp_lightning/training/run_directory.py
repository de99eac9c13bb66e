"""What a run directory holds, and whether a command may use it."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from pathlib import Path
from typing import IO, Any

RUN_FILE = "run.json"
LEDGER_FILE = "ledger.json"
STEPS_FILE = "steps.txt"
STATISTICS_FILE = "statistics.npz"
CONFIG_FILE = "config.yaml"
PLAN_FILE = "plan.json"
LOCK_FILE = "lock"
CHECKPOINTS = "checkpoints"
LAST = "last.ckpt"


class RunDirectory:
    """One directory per run: resolved configuration, plan, ledger of branches, checkpoints, logs and reports.

    Nothing is written before :meth:`claim`. ``run.json`` says whether the run is running, stopped (it may be
    continued) or finished (its plan's steps are spent).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: IO[str] | None = None
        self._fresh_id = secrets.token_hex(4)

    @property
    def ledger(self) -> Path:
        return self.path / LEDGER_FILE

    @property
    def steps(self) -> Path:
        return self.path / STEPS_FILE

    @property
    def statistics(self) -> Path:
        return self.path / STATISTICS_FILE

    @property
    def config(self) -> Path:
        return self.path / CONFIG_FILE

    @property
    def checkpoint(self) -> Path:
        return self.path / CHECKPOINTS / LAST

    @property
    def id(self) -> str:
        """A name for loggers that stays the same when the run is continued."""
        record = self.record()
        return str(record.get("id", self._fresh_id)) if record is not None else self._fresh_id

    def record(self) -> dict[str, Any] | None:
        """The content of run.json; None where there is none."""
        file = self.path / RUN_FILE
        if not file.exists():
            return None
        try:
            record = json.loads(file.read_text())
            if not (isinstance(record, dict) and "plan" in record and "status" in record):
                raise ValueError("plan or status is missing")
        except ValueError as error:
            raise ValueError(f"{file} cannot be read ({error}). HINT: restore it, or use another --run_dir.") from error
        return record

    def check(self, plan_digest: str) -> bool:
        """Whether to continue an unfinished run of the same plan; refuses what must not be continued."""
        record = self.record()
        if record is None:
            if self.path.exists() and (not self.path.is_dir() or any(f.name != LOCK_FILE for f in self.path.iterdir())):
                raise ValueError(
                    f"--run_dir {self.path} exists and is not a run directory. HINT: name a new or empty directory."
                )
            return False
        if record["status"] == "finished":
            raise ValueError(
                f"the run in {self.path} is finished; training on would exceed its plan. "
                "HINT: use a new --run_dir, or raise the plan's steps there."
            )
        if record["plan"] != plan_digest:
            raise ValueError(
                f"the run in {self.path} has another privacy plan, and a ledger belongs to one plan. "
                "HINT: use a new --run_dir, or the options the run was started with (see its config.yaml)."
            )
        return True

    def claim(self, plan_digest: str, plan: dict[str, Any], config: str) -> bool:
        """Take the directory, once everything else has been checked; whether an unfinished run is continued.

        One process holds it until it ends. The configuration of a continued run stays the one it was started
        with.
        """
        if self._lock is None:
            self.check(plan_digest)
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
        continued = self.check(plan_digest)  # again: another process may have finished the run meanwhile
        if not continued:
            _replace(self.config, config)
            _replace(self.path / PLAN_FILE, json.dumps(plan, indent=1))
        self.mark("running", plan_digest)
        return continued

    def mark(self, status: str, plan_digest: str, **facts: Any) -> None:
        record = {"status": status, "plan": plan_digest, "id": self.id, **facts}
        _replace(self.path / RUN_FILE, json.dumps(record, indent=1))

    def release(self) -> None:
        """Let another process, or another Trainer of this one, take the directory."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        lock = open(self.path / LOCK_FILE, "w")  # noqa: SIM115 - held until the process ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise ValueError(
                f"another process is training in {self.path}. HINT: wait for it, or use another --run_dir."
            ) from error
        self._lock = lock


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
