"""Which data sets short trainings keep in memory."""

from __future__ import annotations

import pytest

from lipdp_lightning.data_modules import Digits
from lipdp_lightning.data_modules.base import PrivateDataModule
from lipdp_lightning.experiment import short_training as run


def asked_for(*names: str) -> list[PrivateDataModule]:
    found = []
    for name in names:
        found.append(run._known_data(name, Digits()))
        found[-1].setup()
    return found


def test_rows_are_kept_as_long_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_kept_data", {})
    monkeypatch.setattr(run, "KEPT_DATA_SETS", 3)
    one, two, again, _, _, new = asked_for("a", "b", "a", "c", "d", "b")
    assert again is one and new is not two  # b was the one not used for longest
    assert list(run._kept_data) == ["c", "d", "b"]
    size = run._bytes_in_memory(one)
    assert size == 1797 * 64  # the bytes of all images, those held out among them
    monkeypatch.setattr(run, "KEPT_BYTES", int(1.5 * size))
    asked_for("e")
    assert list(run._kept_data) == ["b", "e"]
    monkeypatch.setattr(run, "KEPT_BYTES", 0)
    asked_for("f")
    assert list(run._kept_data) == ["f"]
