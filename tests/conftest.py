"""Helpers in this folder (private_step.py) can be imported from every test below it."""

import pytest

LAUNCHED = ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Trainer leaves its rank in the environment, and a command started from there would wait for other ranks."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
