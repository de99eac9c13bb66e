"""The client of rank_server.py: worlds of real processes for the tests of this folder."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class Outcome:
    """How a world ended. A code is None for a rank that hung and was killed."""

    codes: list[int | None]
    results: list[Any]
    logs: list[str]
    seconds: float


class Worlds:
    """Runs jobs of rank_jobs.py on worlds of processes; results of equal requests are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._count, self._kept = folder, 0, dict[str, Outcome]()
        environment = os.environ | dict.fromkeys(THREADS, "1") | {"CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHONPATH"] = os.pathsep.join(
            map(str, [HERE, HERE.parent, HERE.parent.parent, HERE.parent / "adoption"])
        )
        self._errors = open(folder / "server.log", "w")  # noqa: SIM115 - as long as the server
        self._server = subprocess.Popen(
            [sys.executable, str(HERE / "rank_server.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True, env=environment,
        )  # fmt: skip

    def attempt(
        self, job: str, size: int, *, nodes: int = 1, timeout: float = 60, kill: Any = None, **options: Any
    ) -> Outcome:
        """Run a job on ``size`` processes, however it ends."""
        self._count += 1
        request = {
            "job": job, "size": size, "nodes": nodes, "timeout": timeout, "kill": kill, "options": options,
            "folder": str(self.folder / f"{self._count}-{job}-{size}"),
        }  # fmt: skip
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        reply = self._server.stdout.readline()
        assert reply, f"the server ended: {(self.folder / 'server.log').read_text()[-3000:]}"
        return Outcome(**json.loads(reply))

    def run(self, job: str, size: int, **options: Any) -> list[Any]:
        """What each rank returned; every rank must have ended well. Equal requests are run once."""
        key = json.dumps([job, size, options], sort_keys=True)
        if key not in self._kept:
            self._kept[key] = self.attempt(job, size, **options)
        outcome = self._kept[key]
        assert outcome.codes == [0] * size, f"{job} on {size}: {outcome.codes}\n" + "\n--\n".join(outcome.logs)
        return outcome.results

    def close(self) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._server.stdout.close()
        self._errors.close()
