"""One cluster for all tests that need one, and a reason to skip where there is none."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_box import Box, missing


@pytest.fixture(scope="session")
def box() -> Iterator[Box]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    # a short path: the length of a socket's name is limited
    started = Box(Path(tempfile.mkdtemp(prefix="box")))
    try:
        started.start()
        yield started
    except BaseException:
        for log in sorted((started.folder / "log").glob("*")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}")
        raise
    finally:
        started.stop()
        shutil.rmtree(started.folder, ignore_errors=True)
