"""Starts the other processes of a run on one machine; if one of them dies, those that are left end with a word."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

LOST = 1
"""The exit code where another process of the run ended."""

_LOOK = 0.5  # seconds between two looks
_PATIENCE = 10.0  # seconds in which the first process may end by itself, with an error of its own
_FIRST = "LIPDP_FIRST_PROCESS"  # tells the processes that are started the number of the first


class Launcher(_SubprocessScriptLauncher):
    """Starts processes as Lightning does. Lightning's observer would end the first one by SIGKILL, without a word."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Starts the other processes, and calls the function in this one."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[_FIRST] = str(os.getpid())
            self._call_children_scripts()
            threading.Thread(target=watch, args=(self.procs,), daemon=True, name="watch over processes").start()
        elif _FIRST in os.environ and self.cluster_environment.local_rank() > 0:
            first = int(os.environ[_FIRST])
            threading.Thread(target=watch_first, args=(first,), daemon=True, name="watch over the first").start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


def watch(started: Sequence[subprocess.Popen[Any]], patience: float = _PATIENCE) -> None:
    """Waits until all processes have ended well; if one has not, ends the others and this process.

    A collective operation fails by itself if a process is gone, and its error says more. A process that is not in one,
    since it evaluates or reads rows, would go on alone.
    """
    while True:
        codes = [process.poll() for process in started]
        if any(codes):
            break
        if all(code == 0 for code in codes):
            return
        time.sleep(_LOOK)
    time.sleep(patience)
    for process in started:
        process.kill()
    rank, code = next((rank, code) for rank, code in enumerate(codes, 1) if code)
    _end(f"rank {rank}, ended {f'by signal {-code}' if code < 0 else f'with exit code {code}'}")


def watch_first(first: int, patience: float = _PATIENCE) -> None:
    """Ends this process once the one that started it is gone; it would wait for a connection to it, for half an
    hour.
    """
    while os.getppid() == first:
        time.sleep(_LOOK)
    time.sleep(patience)
    _end("rank 0, ended")


def _end(who: str) -> None:
    sys.stderr.write(
        f"lipdp: another process of this run, {who}, so this one ends too. Everything up to the last checkpoint is "
        "kept. HINT: look for what ended it; then run the same command with the same --run_dir.\n"
    )
    sys.stderr.flush()
    os._exit(LOST)
