"""Runs one contender in its process, and records what it answers or why it has no answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from .contender_rows import FAILED, OUT_OF_MEMORY, TOO_SLOW, Row
from .contenders import Job
from .peak_memory import PROMPT, available_bytes
from .turns import Worker, WorkerEndedError, environment

SET_UP_LIMIT = 180.0
"""Seconds until a process must be ready for its first step."""

SHARE_OF_MEMORY = 0.85
"""Share of the available memory that one contender may take if no limit is given; the machine must not run out."""


@dataclass
class Entry:
    """A contender of a cell, while one of its processes is measured."""

    row: Row
    worker: Worker
    first: float = 0.0
    turns: dict[int, list[float]] = field(default_factory=dict)

    def ask(self, limit: float, **order: Any) -> dict[str, Any] | None:
        return self._answer(lambda: self.worker.ask(limit, **order), limit)

    def ready(self) -> None:
        report = self._answer(lambda: self.worker.answer(SET_UP_LIMIT), SET_UP_LIMIT)
        self.row.parameters = int((report or {}).get("parameters", self.row.parameters))

    def _answer(self, ask: Callable[[], dict[str, Any]], limit: float) -> dict[str, Any] | None:
        """Returns its report, or None if it has none to give; the row then says why."""
        try:
            report = ask()
        except WorkerEndedError as error:
            if error.killed_for == "time":
                return self._lost(TOO_SLOW, f"no answer within {limit:.0f} s")
            if error.killed_for == "memory" or error.code == -9:
                by_limit = error.killed_for == "memory"
                return self._lost(OUT_OF_MEMORY, "ended at the memory limit" if by_limit else "ended by the system")
            return self._lost(FAILED, str(error).splitlines()[-1])
        if "out_of_memory" in report:
            return self._lost(OUT_OF_MEMORY, report["out_of_memory"])
        return self._lost(FAILED, report["failed"]) if "failed" in report else report

    def _lost(self, status: str, reason: str) -> dict[str, Any] | None:
        """Writes down why there is no report, ends the process and returns None."""
        self.row.status, self.row.reason = status, " ".join(reason.split())[:300]
        self.worker.close()
        return None


def started(job: Job) -> Entry:
    """Starts the process, which begins its set-up; with ``job.memory`` it returns freed memory to the system."""
    limit = job.memory_limit
    if limit is None and job.device == "cpu":
        available = available_bytes()
        limit = None if available is None else int(SHARE_OF_MEMORY * available)
    command = [sys.executable, "-m", "lipdp_lightning.bench.worker", json.dumps(asdict(job))]
    environments = [environment(job.threads, PROMPT if job.memory else None)]
    worker = Worker(command, environments, limit if job.device == "cpu" else None)
    return Entry(Row(job.model, job.batch_size, job.contender, threads=job.threads), worker)
