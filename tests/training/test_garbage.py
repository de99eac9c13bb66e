"""Objects that were alive at set-up are left out of collections while a run lasts, and not afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from lightning.pytorch.callbacks import Callback
from small_runs import fit, make_plan

from lipdp_lightning.training.garbage import resume_collections, spare_collections


class Counting(Callback):
    def __init__(self) -> None:
        self.frozen: list[int] = []

    def on_train_batch_start(self, *_: object) -> None:
        self.frozen.append(gc.get_freeze_count())


@pytest.fixture(autouse=True)
def collections_as_ever() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.enable()
    gc.unfreeze()


def test_objects_of_the_set_up_are_set_aside_while_a_run_lasts() -> None:
    counting = Counting()
    fit(make_plan(steps=2), counting)
    assert len(counting.frozen) == 2 and min(counting.frozen) > 10_000
    assert gc.get_freeze_count() == 0


def test_what_the_user_has_chosen_is_left_alone() -> None:
    gc.disable()
    assert not spare_collections() and gc.get_freeze_count() == 0
    gc.enable()
    gc.freeze()
    assert not spare_collections() and gc.get_freeze_count() > 0
    resume_collections()
    assert spare_collections() and gc.get_freeze_count() > 0
