"""Starts worlds of processes on request: one JSON object per line on stdin, one reply per line on stdout.

Everything is imported and compiled once, in a run of one process that ends before the first request; each world is
forked from here, with the environment variables that a launcher would set. Every rank has one thread, a time limit, and
is killed by its own process id.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import matplotlib.backends.backend_agg  # noqa: F401 - here once, and not in every rank
import opacus.accountants  # noqa: F401
import rank_jobs
import torch
from worlds import free_port

GRACE = 40.0  # seconds within which the others must end once one rank was killed or has failed


def start(request: dict[str, Any], rank: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with open(folder / f"{rank}.log", "w") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        nodes = request.get("nodes", 1)
        local = request["size"] // nodes
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(request["size"]),
            "NODE_RANK": str(rank // local), "LOCAL_RANK": str(rank % local),
        }  # fmt: skip
        warnings.simplefilter("ignore")
        job = getattr(rank_jobs, request["job"])
        result = job(rank_jobs.World(rank, request["size"], nodes), **request.get("options", {}))
        (folder / f"{rank}.json").write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pids: list[int], request: dict[str, Any]) -> list[int | None]:
    """Exit codes, negative for signals; None for a rank that had to be killed because it did not end."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + request.get("timeout", 60)
    kill = dict(request.get("kill") or {})
    while len(codes) < len(pids) and time.monotonic() < deadline:
        if kill and Path(kill["when"]).exists():
            for rank in kill["ranks"]:
                os.kill(pids[rank], signal.SIGKILL)
            kill = {}
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    if codes[pid]:
                        deadline = min(deadline, time.monotonic() + GRACE)
        time.sleep(0.01)
    for pid in pids:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids]


def serve(request: dict[str, Any]) -> dict[str, Any]:
    folder = Path(request["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    port, ranks = free_port(), range(request["size"])
    started = time.monotonic()
    codes = wait([start(request, rank, port, folder) for rank in ranks], request)
    files = [folder / f"{rank}.json" for rank in ranks]
    return {
        "codes": codes,
        "results": [json.loads(f.read_text()) if f.exists() else None for f in files],
        "logs": [(folder / f"{rank}.log").read_text()[-6000:] for rank in ranks],
        "seconds": time.monotonic() - started,
    }


def warm_up() -> None:
    """Runs a world of one process here, so that no rank has to load the compiled loops or read its own sources again.

    Four fifths of a rank's time would go into that. Its random numbers are put back to where they began.
    """
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        warnings.simplefilter("ignore")
        state = torch.get_rng_state()
        rank_jobs.final_weights(rank_jobs.World(0, 1))
        torch.set_rng_state(state)
    gc.freeze()  # a rank that collects garbage would copy every page that it shares with this process


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    warm_up()
    for line in sys.stdin:
        replies.write(json.dumps(serve(json.loads(line))) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
