"""A step is on the record of released steps, on the disk, before anything of it is released."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from small_runs import fit, make_plan

from lipdp_lightning.mechanism.step import Mechanism
from lipdp_lightning.privacy import branches
from lipdp_lightning.training.strategy import PrivateStrategy


class Late(PrivateStrategy):
    """Broken on purpose: reserves a step when it has been released."""

    def _begin_step(self) -> None:
        reserve, self.branches.reserve = self.branches.reserve, lambda step: None  # type: ignore[method-assign]
        super()._begin_step()
        self.branches.reserve = reserve  # type: ignore[method-assign]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        self.branches.reserve(self.lightning_module.trainer.global_step)
        return output


def reached_before_releases(directory: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[tuple[int, int]]:
    """(step, steps that are durably on record) at each release; a file counts when it was flushed to the disk."""
    found, durable = [], {"reached": 0}
    ledger, flush = directory / "ledger.json", os.fsync

    def flushed(descriptor: int) -> None:
        flush(descriptor)
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # the last of what makes a replaced file durable
            durable["reached"] = json.loads(ledger.read_text())["branches"][0]["reached"]

    def release(self: Mechanism, step: int, *rest: Any) -> None:
        found.append((step, durable["reached"]))
        privatize(self, step, *rest)

    privatize = Mechanism.privatize_
    monkeypatch.setattr(branches, "RESERVED_AT_ONCE", 2)
    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Mechanism, "privatize_", release)
    fit(make_plan(steps=5), directory=directory, **options)
    return found


def test_a_step_is_durably_reserved_before_it_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = reached_before_releases(tmp_path, monkeypatch)
    assert [step for step, _ in found] == list(range(5))
    assert all(reached > step for step, reached in found)


def test_a_late_reservation_fails_the_same_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lipdp_lightning.training.model_checks.STRATEGY_METHODS", ())  # which would refuse it at once
    found = reached_before_releases(tmp_path, monkeypatch, strategy_kind=Late)
    assert not all(reached > step for step, reached in found)
