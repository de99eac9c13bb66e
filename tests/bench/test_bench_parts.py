"""The time of a step by part: every point exists, and a part's time is its own."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from lipdp_lightning.bench import step_parts as parts
from lipdp_lightning.bench.step_parts import POINTS, Parts, place_of


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point[2])
def test_every_point_is_a_function_of_the_library(point: tuple[str, str, str]) -> None:
    holder, name = place_of(*point[1:])
    assert callable(getattr(holder, name))


class Nested:
    def outer(self) -> None:
        time.sleep(0.02)
        self.inner()
        time.sleep(0.02)

    def inner(self) -> None:
        time.sleep(0.06)


def test_the_time_of_a_part_is_that_without_the_parts_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    points = tuple((name, __name__, f"Nested.{name}") for name in ("outer", "inner"))
    monkeypatch.setattr(parts, "POINTS", points)
    for name in ("outer", "inner"):
        monkeypatch.setattr(Nested, name, getattr(Nested, name))  # what is timed here is restored
    timer = Parts(torch.device("cpu"))
    timer.install()
    start = time.perf_counter()
    Nested().outer()
    whole = time.perf_counter() - start
    seconds = timer.take()
    assert seconds["outer"] >= 0.04
    assert seconds["inner"] >= 0.06 and timer.take_beside() == {}
    assert sum(seconds.values()) == pytest.approx(whole, abs=0.005)
    thread = threading.Thread(target=Nested().inner)
    thread.start()
    thread.join()
    assert timer.take() == seconds and timer.take_beside()["inner"] >= 0.06
