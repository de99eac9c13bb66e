"""The contender jax, checked in a process of its own: jax starts threads, and other tests fork."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lipdp_lightning.extras import is_installed


@pytest.mark.skipif(not is_installed("jax"), reason="jax is not installed")
def test_networks_and_steps_are_those_of_dp_sgd() -> None:
    checks = Path(__file__).with_name("jax_checks.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(checks)]
    outcome = subprocess.run(command, capture_output=True, text=True)
    assert outcome.returncode == 0 and "8 passed" in outcome.stdout, outcome.stdout[-3000:]
