"""What a run directory holds, and whether a command may use it."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import IO, Any

RUN_FILE = "run.json"
LEDGER_FILE = "ledger.json"
CHECKPOINTS = "checkpoints"
LAST = "last.ckpt"


class RunDirectory:
    """One directory per run: resolved configuration, plan, ledger of branches, checkpoints, logs and reports."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: IO[str] | None = None

    @property
    def ledger(self) -> Path:
        return self.path / LEDGER_FILE

    @property
    def checkpoint(self) -> Path:
        return self.path / CHECKPOINTS / LAST

    def record(self) -> dict[str, Any] | None:
        file = self.path / RUN_FILE
        if not file.exists():
            return None
        try:
            record = json.loads(file.read_text())
            assert isinstance(record, dict) and "plan" in record and "status" in record
        except (ValueError, AssertionError) as error:
            raise ValueError(f"{file} cannot be read ({error}). HINT: restore it, or use another --run_dir.") from error
        return record

    def check(self, plan_digest: str) -> bool:
        """Whether to continue an unfinished run of the same plan; refuses what must not be continued."""
        record = self.record()
        if record is None:
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
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

    def create(self, plan_digest: str, plan: dict[str, Any], config: str) -> None:
        """Take the directory, once everything else has been checked."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        if self.record() is None:
            _replace(self.path / "config.yaml", config)
            _replace(self.path / "plan.json", json.dumps(plan, indent=1))
        self.mark("running", plan_digest)

    def mark(self, status: str, plan_digest: str, **facts: Any) -> None:
        _replace(self.path / RUN_FILE, json.dumps({"status": status, "plan": plan_digest, **facts}, indent=1))

    def _take_lock(self) -> None:
        lock = open(self.path / "lock", "w")  # noqa: SIM115 - held until the process ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"another process is training in {self.path}. HINT: wait for it, or use another --run_dir."
            ) from error
        self._lock = lock


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
