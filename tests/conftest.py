"""Options for a run in little time. Helpers in this folder (private_step.py) can be imported from every test below."""

import gc
import hashlib
import time
from pathlib import Path

import hypothesis
import pytest

# a busy machine is no reason to fail
hypothesis.settings.register_profile("without deadlines", deadline=None)
hypothesis.settings.load_profile("without deadlines")

LAUNCHED = ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STARTED = time.monotonic()
SLOW = Path(__file__).with_name("slow_tests.txt")

# Thousands of collected tests are all kept: a collection of garbage among them looks at every one, and frees none.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("little time")
    group.addoption("--within", type=float, metavar="SECONDS", help="skip what would begin later than this")
    group.addoption("--order", metavar="WORD", help="take the files in an order that this word decides")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m does not name
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = set(SLOW.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
    word = config.getoption("--order")
    if word is not None:  # whole files: what their tests share is made once
        items.sort(key=lambda item: hashlib.sha256(f"{word} {item.path.name}".encode()).digest())


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    within = item.config.getoption("--within")
    if within is not None and time.monotonic() - STARTED > within:
        pytest.skip(f"it would have begun later than the {within:.0f} s of --within")


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Trainer leaves its rank in the environment, and a command started from there would wait for other ranks."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
