"""A signal that comes when a finished run's process is about to end: lipdp_lightning/slurm/signals.py."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

CODE = """
import os, signal, sys
from lipdp_lightning.slurm.signals import ignore, listen

class Late:
    # deleted when the interpreter has given signals their defaults back
    def __del__(self, kill=os.kill, me=os.getpid(), number=signal.SIGUSR1):
        kill(me, number)

late = Late()
listen([signal.SIGUSR1])
if sys.argv[1] == "ignored":
    ignore(signal.SIGUSR1)
"""


@pytest.mark.parametrize(("then", "code"), [("ignored", 0), ("listened to", -signal.SIGUSR1)])
def test_a_warning_that_comes_too_late_does_not_fail_the_job(then: str, code: int) -> None:
    assert subprocess.run([sys.executable, "-c", CODE, then], timeout=60).returncode == code
