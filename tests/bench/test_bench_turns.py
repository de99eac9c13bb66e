"""Processes in turns: what is reported, and how one ends that takes too much memory or time."""

from __future__ import annotations

import statistics
import sys
import time

import pytest

from lipdp_lightning.bench.turns import Worker, WorkerEndedError, environment, resident_bytes

STEPS = """
import time
from lipdp_lightning.bench.turns import Steps
steps, number = Steps(facts=lambda order: {"asked": order}), 0
while True:
    steps.between()
    time.sleep(0.03 if number == 0 else 0.002)
    number += 1
"""
GROWING = """
from lipdp_lightning.bench.turns import Steps
steps, held = Steps(), []
while True:
    steps.between()
    held.append(bytearray(b"x") * 2**20)
"""


def worker(code: str, memory_limit: int | None = None) -> Worker:
    return Worker([sys.executable, "-c", code], [environment(1)], memory_limit)


def test_a_turn_reports_its_steps_and_not_those_that_warm_up() -> None:
    measured = worker(STEPS)
    try:
        assert measured.answer(30)["ready"]
        first = measured.ask(30, steps=4, warm_up=1)
        assert first["asked"] == {"steps": 4, "warm_up": 1}
        assert len(first["seconds"]) == 4 and max(first["seconds"]) < 0.028  # that of 0.03 s warms up
        time.sleep(0.1)  # the wait for an order is no step
        second = measured.ask(30, steps=3, warm_up=0)
        assert len(second["seconds"]) == 3 and 0.002 <= statistics.median(second["seconds"]) < 0.03
    finally:
        measured.close()


def test_a_process_beyond_its_memory_is_ended_and_one_within_is_not() -> None:
    measured = worker(GROWING, memory_limit=resident_bytes("self") + 2**28)
    try:
        measured.answer(30)
        measured.ask(30, steps=5, warm_up=0)
        with pytest.raises(WorkerEndedError) as error:
            measured.ask(60, steps=10**6, warm_up=0)
        assert error.value.killed_for == "memory"
    finally:
        measured.close()


def test_a_process_without_an_answer_is_ended_in_time() -> None:
    measured = worker("import time; time.sleep(60)")
    start = time.monotonic()
    with pytest.raises(WorkerEndedError) as error:
        measured.answer(0.2)
    assert error.value.killed_for == "time" and time.monotonic() - start < 10
    measured.close()


def test_a_failed_process_tells_what_it_said() -> None:
    measured = worker("raise SystemExit('no such thing')")
    with pytest.raises(WorkerEndedError, match="no such thing"):
        measured.answer(30)
    measured.close()
