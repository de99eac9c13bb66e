"""Runs processes that are measured in turns: while one works, the others wait in a read.

All meet the machine in the same state, and none disturbs another. The measured process calls ``Steps.between`` before
every step; the measuring one gives its orders through a ``Worker``, and gets the seconds of every step of a turn.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MARK = "turn "
_THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_LAUNCHED = ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_POLL = 0.03  # seconds between two looks at the memory of the working process


def say(**report: Any) -> None:
    """Sends a report from the measured process to the measuring one."""
    sys.stdout.write(f"{MARK}{json.dumps(report)}\n")
    sys.stdout.flush()


def listen() -> dict[str, Any]:
    """Waits for the next order and returns it."""
    line = sys.stdin.readline()
    if not line:
        raise EOFError("the measurement has ended")
    order: dict[str, Any] = json.loads(line)
    return order


def bind_to_processors(count: int, first: int = 0) -> None:
    """Binds the process to ``count`` processors, if the system can, so that threads beside the step share them."""
    if hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {mine[(first + index) % len(mine)] for index in range(count)})


class WallClock:
    """Measures seconds between marks."""

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(marks)]


class Steps:
    """Times the steps of a process that is measured in turns.

    An order is {"steps": n, "warm_up": w, ...}: w steps that are not reported, then n that are. ``facts`` is called
    with None when the process is ready, and with its order after each turn; its result is reported as well.
    ``on_order`` is called with each order before its turn.
    """

    def __init__(
        self,
        clock: WallClock | None = None,
        facts: Callable[[dict[str, Any] | None], dict[str, Any]] = lambda order: {},
        on_order: Callable[[dict[str, Any]], None] = lambda order: None,
    ) -> None:
        self._clock, self._facts, self._on_order = clock or WallClock(), facts, on_order
        self._order: dict[str, Any] | None = None
        self._marks: list[Any] = []

    def between(self) -> None:
        """Ends a complete turn before a step, and waits for the order of the next one."""
        if self._order is None:
            say(ready=True, **self._facts(None))
        else:
            self._marks.append(self._clock.mark())
            if len(self._marks) <= self._order["warm_up"] + self._order["steps"]:
                return
            self._report()
        self._order = listen()
        self._on_order(self._order)
        self._marks = [self._clock.mark()]

    def end(self) -> None:
        """Ends the last turn after its last step, for a process that has no more to do."""
        if self._order is not None:
            self._marks.append(self._clock.mark())
            self._report()

    def _report(self) -> None:
        assert self._order is not None
        say(seconds=self._clock.seconds(self._marks)[self._order["warm_up"] :], **self._facts(self._order))


class WorkerEndedError(RuntimeError):
    """The process has ended. ``killed_for`` is memory or time if the measurement ended it."""

    def __init__(self, message: str, killed_for: str = "", code: int | None = None) -> None:
        super().__init__(message)
        self.killed_for, self.code = killed_for, code


class Worker:
    """The processes of one contender, one for each environment; the first one takes the orders.

    A process whose resident memory exceeds ``memory_limit`` bytes while it works is ended.
    """

    def __init__(
        self, command: Sequence[str], environments: Sequence[Mapping[str, str]], memory_limit: int | None = None
    ) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - as long as the worker
        self._memory_limit = memory_limit
        self._ranks = [
            subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.DEVNULL if rank else subprocess.PIPE,
                stdout=subprocess.DEVNULL if rank else subprocess.PIPE, stderr=self._errors,
            )
            for rank, environment in enumerate(environments)
        ]  # fmt: skip
        self._buffer = b""

    def send(self, **order: Any) -> None:
        """Lets it work for one turn, whose report ``answer`` returns."""
        stdin = self._ranks[0].stdin
        assert stdin is not None
        try:
            stdin.write(f"{json.dumps(order)}\n".encode())
            stdin.flush()
        except BrokenPipeError:
            pass  # its last output is read by answer

    def ask(self, time_limit: float, **order: Any) -> dict[str, Any]:
        """Lets it work for one turn, and returns its report."""
        self.send(**order)
        return self.answer(time_limit)

    def answer(self, time_limit: float) -> dict[str, Any]:
        """Returns its next report, and skips everything else that it prints."""
        deadline = time.monotonic() + time_limit
        while True:
            line = self._line(deadline)
            if line.startswith(MARK):
                report: dict[str, Any] = json.loads(line[len(MARK) :])
                return report

    def _line(self, deadline: float) -> str:
        stdout = self._ranks[0].stdout
        assert stdout is not None
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([stdout], [], [], _POLL)
            if ready:
                read = os.read(stdout.fileno(), 65536)
                if not read:
                    raise self._ended("")
                self._buffer += read
            elif time.monotonic() > deadline:
                raise self._ended("time")
            elif self._memory_limit is not None and resident_bytes(self._ranks[0].pid) > self._memory_limit:
                raise self._ended("memory")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace")

    def _ended(self, killed_for: str) -> WorkerEndedError:
        if killed_for:
            self.kill()
        code = self._ranks[0].wait()
        self._errors.seek(0)
        said = self._errors.read()[-2000:].strip()
        return WorkerEndedError(f"a process of the measurement failed, or took too long: {said}", killed_for, code)

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def close(self) -> None:
        self.kill()
        for rank in self._ranks:
            rank.wait()
            for pipe in (rank.stdin, rank.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        self._errors.close()


def environment(threads: int, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the variables of a measured process: as many threads as asked for, no launcher's, and those of
    ``more``.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    paths = [path for path in (os.getcwd(), kept.get("PYTHONPATH")) if path]
    own = dict.fromkeys(_THREAD_SETTINGS, str(threads)) | {"PYTHONPATH": os.pathsep.join(paths)}
    return kept | own | dict(more or {})


def resident_bytes(pid: int | str) -> int:
    """Returns the memory that a process holds; 0 if the system does not tell."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
