"""Runs cells in processes of their own, one thread each; a cell that fails or dies takes nothing else with it."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lipdp_lightning.studies.reproduce.entry import Cell, Row, checked_result

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cell: a result, or the error in one line."""

    index: int
    result: Row | None
    error: str
    seconds: float


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    index: int = -1
    started: float = 0.0


def run_cells(
    module: str, name: str, cells: Sequence[Cell], wanted: Sequence[int], jobs: int, log: Path
) -> Generator[Outcome, None, None]:
    """Yields outcomes of the `wanted` cells as they finish. Leaving the iterator early ends the workers."""
    waiting = list(reversed(wanted))
    workers: list[_Worker] = []
    with _one_thread():
        try:
            workers = [_start(module, name, log) for _ in range(min(jobs, len(waiting)))]
            busy = [_give(worker, waiting, cells) for worker in workers]
            while busy:
                ready = wait([worker.connection for worker in busy])
                for worker in [worker for worker in busy if worker.connection in ready]:
                    yield _take(worker)
                    busy.remove(worker)
                    if not waiting:
                        continue
                    if not worker.process.is_alive():
                        workers.remove(worker)
                        worker = _start(module, name, log)
                        workers.append(worker)
                    busy.append(_give(worker, waiting, cells))
        finally:
            for worker in workers:
                _stop(worker)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sets variables that processes started within read when they load their libraries."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _start(module: str, name: str, log: Path) -> _Worker:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(module, name, theirs, str(log)), name=f"lipdp reproduce {name}")
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _give(worker: _Worker, waiting: list[int], cells: Sequence[Cell]) -> _Worker:
    worker.index, worker.started = waiting.pop(), time.monotonic()
    with suppress(BrokenPipeError):  # if it has died, reading from it will notice
        worker.connection.send(dict(cells[worker.index]))
    return worker


def _take(worker: _Worker) -> Outcome:
    try:
        result, error, seconds = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        seconds = time.monotonic() - worker.started
        return Outcome(worker.index, None, f"its process ended with code {worker.process.exitcode}", seconds)
    return Outcome(worker.index, result, error, seconds)


def _stop(worker: _Worker) -> None:
    worker.connection.close()
    worker.process.terminate()
    worker.process.join(10)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()


def _serve(module: str, name: str, connection: Connection, log: str) -> None:
    """Serves cells until the other end is closed; what the worker prints goes to the log."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    run: Any = None
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            cell = connection.recv()
            start = time.process_time()
            result, error = None, ""
            try:
                if run is None:
                    run = _runner(module, name)
                result = dict(checked_result(cell, run(cell)))
            except Exception as failure:
                traceback.print_exc()
                text = " ".join(str(failure).split()) or "no message"
                error = f"{type(failure).__name__}: {text}"
            connection.send((result, error, time.process_time() - start))


def _runner(module: str, name: str) -> Any:
    from lipdp_lightning.studies.reproduce.catalogue import entries_of

    return next(listed.entry.run for listed in entries_of(module) if listed.entry.name == name)
