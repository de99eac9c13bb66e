"""Turns signals into flags: the handler remembers, and the training loop acts at the next step boundary."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any


class SignalFlag:
    """Handles a signal by remembering it.

    Weights in the middle of an update are not a checkpoint, and a collective in a handler meets whatever collective the
    other ranks are in, so nothing is saved or agreed on here.
    """

    def __init__(self) -> None:
        self.preempted = False
        self.terminated = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self.terminated = True
        else:
            self.preempted = True


def listen(numbers: Iterable[int]) -> tuple[SignalFlag, dict[int, Any]]:
    """Installs a SignalFlag for the signals, and returns it with the previous handlers.

    A flag that already listens, because the command was told to before its imports, is taken over with what it has
    received. Outside the main thread no handler can be installed, and the flag stays down.
    """
    numbers = list(numbers)
    present = [signal.getsignal(number) for number in numbers]
    flag = next((handler for handler in present if isinstance(handler, SignalFlag)), SignalFlag())
    if threading.current_thread() is not threading.main_thread():
        return flag, {}
    for number in numbers:
        signal.signal(number, flag)
    return flag, dict(zip(numbers, present, strict=True))


def restore(handlers: dict[int, Any]) -> None:
    """Restores the handlers that :func:`listen` has found, unless one was a flag, which keeps listening."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number, handler in handlers.items():
        if handler is not None and not isinstance(handler, SignalFlag):
            signal.signal(number, handler)


def ignore(number: int) -> None:
    """Ignores a signal for the rest of the process, which needs no warning any more.

    Before it ends, the interpreter restores the default of every signal that has a Python handler, which for SIGUSR1 is
    to end the process as a failed one. An ignored signal stays ignored.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, signal.SIG_IGN)
