"""A process of a run that dies while the first one is in no collective operation: training/launcher.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

# the first process hangs, with two others, of which one dies
HANGS = """
import os, subprocess, sys, time
from lipdp_lightning.training.launcher import watch
import threading
how, patience = sys.argv[1], float(sys.argv[2])
silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
started = [subprocess.Popen(["sleep", "99"], **silent), subprocess.Popen(["sh", "-c", how])]
print(started[0].pid, flush=True)
threading.Thread(target=watch, args=(started, patience), daemon=True).start()
time.sleep(float(sys.argv[3]))
"""


def start(how: str, patience: float, lives: float) -> tuple[int, str, float, int]:
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HANGS, how, str(patience), str(lives)], capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    return done.returncode, done.stderr, time.monotonic() - begun, int(done.stdout)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return open(f"/proc/{pid}/stat").read().split()[2] == "Z"


@pytest.mark.parametrize(
    ("how", "said"), [("kill -9 $$", "rank 2, ended by signal 9"), ("exit 3", "rank 2, ended with exit code 3")]
)
def test_a_process_that_hangs_ends_with_one_line(how: str, said: str) -> None:
    code, err, seconds, other = start(how, patience=0.2, lives=90)
    assert code == 1 and said in err and err.count("\n") == 1 and "HINT" in err, err
    assert seconds < 60 and is_gone(other)


def test_a_process_whose_first_is_gone_ends_with_one_line() -> None:
    """The first starts it and dies; it says so on the file that both write to."""
    waits = (
        "import os, time, threading; from lipdp_lightning.training.launcher import watch_first;"
        "first = os.getppid(); print(os.getpid(), flush=True);"
        "threading.Thread(target=watch_first, args=(first, 0.2), daemon=True).start(); time.sleep(90)"
    )
    first = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {waits!r}]); time.sleep(90)"
    process = subprocess.Popen([sys.executable, "-c", first], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    process.kill()
    _, err = process.communicate(timeout=60)  # the other has let go of the pipe, too
    assert err.count("\n") == 1 and "rank 0, ended" in err and "HINT" in err


@pytest.mark.parametrize(("how", "lives"), [("kill -9 $$", 2.0), ("exit 0", 3.0)])
def test_a_process_that_ends_by_itself_and_ones_that_end_well_are_left_alone(how: str, lives: float) -> None:
    code, err, _, other = start(how, patience=80 if "kill" in how else 0.0, lives=lives)
    assert code == 0 and err == ""
    if not is_gone(other):
        os.kill(other, signal.SIGKILL)
