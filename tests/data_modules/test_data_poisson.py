"""Index-tensor loaders: whole batches, no per-item Python, nothing dropped, continued from a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lipdp_lightning.data_modules.poisson import InMemoryRows, PlannedBatches, SequentialBatches, loader


def record(step: int, chunk: int) -> Tensor:
    return torch.tensor([step, chunk])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 19), max_size=30), min_size=1, max_size=6))
def test_each_batch_is_the_indexed_rows(drawn: list[list[int]]) -> None:
    x, y = torch.randn(20, 2, 3), torch.arange(20)
    draws = [torch.tensor(ids, dtype=torch.int64) for ids in drawn]
    sampler = PlannedBatches(lambda step, chunk: draws[step], len(draws), 1, lambda: 0)
    batches = list(loader(InMemoryRows(x, y), sampler))
    assert len(batches) == len(draws), "an empty sample is a batch like any other"
    for (got_x, got_y, ids), wanted in zip(batches, draws, strict=True):
        assert torch.equal(ids, wanted) and torch.equal(got_x, x[wanted]) and torch.equal(got_y, y[wanted])


def test_the_data_set_is_asked_once_per_batch_and_not_once_per_row() -> None:
    class Counting(InMemoryRows):
        calls = 0

        def __getitem__(self, rows: Tensor | slice) -> tuple[Tensor, Tensor, Tensor]:
            Counting.calls += 1
            return super().__getitem__(rows)

    rows = Counting(torch.zeros(1000, 2), torch.zeros(1000))
    list(loader(rows, PlannedBatches(lambda step, chunk: torch.arange(500), 3, 2, lambda: 0)))
    assert Counting.calls == 6
    list(loader(rows, SequentialBatches(1000, 300)))
    assert Counting.calls == 10


def test_batches_are_copies_that_a_step_may_change_in_place() -> None:
    x = torch.zeros(4, 2)
    sampler = PlannedBatches(lambda step, chunk: torch.tensor([1, 1, 2]), 1, 1, lambda: 0)
    ((batch, _, _),) = list(loader(InMemoryRows(x, torch.zeros(4)), sampler))
    batch += 1
    assert x.sum() == 0


def test_an_epoch_has_all_its_steps_and_chunks() -> None:
    sampler = PlannedBatches(record, steps_per_epoch=3, chunks=2, start_step=lambda: 6)
    assert [tuple(pair.tolist()) for pair in sampler] == [(6, 0), (6, 1), (7, 0), (7, 1), (8, 0), (8, 1)]
    assert len(sampler) == 6


def test_the_starting_step_is_asked_at_each_epoch() -> None:
    position = iter([0, 3, 7])
    sampler = PlannedBatches(record, 3, 1, lambda: next(position))
    epochs = [[int(pair[0]) for pair in sampler] for _ in range(3)]
    # the third epoch is resumed at step 7 and ends where it would have ended
    assert epochs == [[0, 1, 2], [3, 4, 5], [7, 8]]


@pytest.mark.parametrize("steps, chunks", [(0, 1), (1, 0), (-1, 1)])
def test_an_epoch_without_steps_is_refused(steps: int, chunks: int) -> None:
    with pytest.raises(ValueError, match="at least 1\nHINT"):
        PlannedBatches(record, steps, chunks, lambda: 0)


@pytest.mark.parametrize("rows, size", [(10, 3), (10, 10), (10, 11), (0, 4)])
def test_sequential_slices_cover_the_rows(rows: int, size: int) -> None:
    sampler = SequentialBatches(rows, size)
    slices = list(sampler)
    assert [i for piece in slices for i in range(rows)[piece]] == list(range(rows))
    assert len(slices) == len(sampler)


@pytest.mark.parametrize("ids", [torch.tensor([0.0]), torch.tensor(1), torch.tensor([[1]]), torch.tensor([True])])
def test_ids_of_the_wrong_kind_are_a_broken_invariant(ids: Tensor) -> None:
    with pytest.raises(AssertionError):
        InMemoryRows(torch.zeros(2, 1), torch.zeros(2))[ids]


def test_an_id_outside_the_rows_is_an_error() -> None:
    with pytest.raises(IndexError):
        InMemoryRows(torch.zeros(2, 1), torch.zeros(2))[torch.tensor([2])]
