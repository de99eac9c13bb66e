"""Loads rows by whole index tensors: one `index_select` per batch and no per-item Python.

The plan's Poisson sampler, a pure function of (secret, step), decides elsewhere which rows a step sees. Nothing here
draws, shuffles, pads or drops: an empty sample is a batch of zero rows, which is a step like any other
(docs/guarantee.md, "What is released").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lipdp_lightning.data_modules.found_files import refusal

Batch = tuple[Tensor, Tensor, Tensor]
Draw = Callable[[int, int], Tensor]
OnDevice = Literal["auto"] | bool
"""Decides whether rows are kept in the memory of the device that trains; with 'auto', if their declared size fits."""

SHARE_OF_MEMORY = 0.5  # of what is free on a device when training starts


class InMemoryRows(Dataset[Batch]):
    """Rows addressed by a LongTensor of ids or by a slice; one item is a whole batch `(x, y, ids)`.

    Args:
        x: features, in memory or mapped from a file; a batch reads the rows that it holds and no others.
        y: labels.
        index: the rows of x and y that belong to this set; None for all. A mapped x is then never copied.
    """

    def __init__(self, x: Tensor, y: Tensor, index: Tensor | None = None) -> None:
        assert len(x) == len(y), "features and labels have different lengths"
        self.x, self.y, self.index = x, y, index

    def __len__(self) -> int:
        return len(self.x) if self.index is None else len(self.index)

    def __getitem__(self, rows: Tensor | slice) -> Batch:
        if isinstance(rows, slice):
            ids = torch.arange(*rows.indices(len(self)))
            if self.index is None:
                return self.x[rows], self.y[rows], ids
            rows = ids
        assert rows.dtype == torch.int64 and rows.dim() == 1, "rows must be a one-dimensional LongTensor"
        places = rows if self.index is None else self.index.index_select(0, rows)
        if self.x.is_cuda:  # the numbers of the rows are all that is copied, and the host does not wait for it
            places, rows = (part.pin_memory().to(self.x.device, non_blocking=True) for part in (places, rows))
        return self.x.index_select(0, places), self.y.index_select(0, places), rows

    def on(self, device: torch.device) -> InMemoryRows:
        """Returns the rows on a device, as they are: bytes stay bytes."""
        return InMemoryRows(self.x.to(device), self.y.to(device), self.index)

    def made_up(self, rows: int, generator: torch.Generator, classes: int | None) -> Batch:
        """Returns random rows of the same shapes and types, with labels below `classes` where there are any."""
        x = torch.rand((rows, *self.x.shape[1:]), generator=generator)
        y = torch.rand((rows, *self.y.shape[1:]), generator=generator)
        x = x if self.x.is_floating_point() else (255 * x).floor()
        y = y if classes is None else (y * max(2, classes)).floor()
        return x.to(self.x.dtype), y.to(self.y.dtype), torch.arange(rows)

    def digest_into(self, digest: Any) -> None:
        """Feeds types, shapes and every value to a hash, some rows at a time."""
        for part, tensor in enumerate((self.x, self.y)):
            digest.update(repr((str(tensor.dtype), (len(self), *tensor.shape[1:]))).encode())
            for rows in slices(len(self), tensor):
                digest.update(self[rows][part].contiguous().numpy().data)


def slices(rows: int, like: Tensor) -> Iterator[slice]:
    """Covers `rows` rows in pieces of about 64 MB."""
    size = max(1, 2**26 // max(1, like[:1].nbytes))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


class PlannedBatches(Sampler[Tensor]):
    """The index tensors of one epoch of logical steps, each cut into `chunks` micro-batches.

    `start_step` is called when the iteration starts, so that a run resumed inside an epoch continues with the step that
    it had reached and stops at that epoch's end.
    """

    def __init__(self, draw: Draw, steps_per_epoch: int, chunks: int, start_step: Callable[[], int]) -> None:
        if steps_per_epoch < 1 or chunks < 1:
            raise refusal(
                f"steps_per_epoch = {steps_per_epoch} and chunks = {chunks} must be at least 1",
                "an epoch has round(1 / sample_rate) steps; chunks is the number of micro-batches per step",
            )
        self.draw, self.steps_per_epoch, self.chunks, self.start_step = (
            draw,
            steps_per_epoch,
            chunks,
            start_step,
        )

    def __len__(self) -> int:
        return self.steps_per_epoch * self.chunks

    def __iter__(self) -> Iterator[Tensor]:
        first = int(self.start_step())
        end = (first // self.steps_per_epoch + 1) * self.steps_per_epoch
        for step in range(first, end):
            for chunk in range(self.chunks):
                yield self.draw(step, chunk)


class SequentialBatches(Sampler[slice]):
    """Consecutive slices that cover `rows` rows once, for held-out data."""

    def __init__(self, rows: int, batch_size: int) -> None:
        self.rows, self.batch_size = rows, batch_size

    def __len__(self) -> int:
        return -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, self.rows, self.batch_size):
            yield slice(start, min(start + self.batch_size, self.rows))


def _as_is(batch: Any) -> Any:
    # the default converter would turn the tuple into a list
    return batch


class AheadLoader(DataLoader[Batch]):
    """Copies each batch to a GPU while the one before is used: from pinned memory, on a stream of its own.

    A batch is handed over once the stream that is to use it waits for its copy, and its memory is not given to anybody
    else before that stream is done. The host waits for nothing, and bytes stay bytes.
    """

    def __init__(self, rows: InMemoryRows, sampler: Sampler[Any], device: torch.device) -> None:
        super().__init__(rows, batch_size=None, sampler=sampler, collate_fn=_as_is)
        self._device = device

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        stream, ahead = torch.cuda.Stream(self._device), None
        for batch in super().__iter__():
            following = self._begun(batch, stream)
            if ahead is not None:
                yield self._arrived(*ahead)
            ahead = following
        if ahead is not None:
            yield self._arrived(*ahead)

    def _begun(self, batch: Batch, stream: Any) -> tuple[Batch, Any]:
        """Begins the copy of a batch; returns the copy, and the event that tells when it is complete."""
        x, y, ids = (part.pin_memory() for part in batch)
        with torch.cuda.stream(stream):
            copied = tuple(part.to(self._device, non_blocking=True) for part in (x, y, ids))
            return copied, stream.record_event()  # type: ignore[return-value]

    def _arrived(self, batch: Batch, copied: Any) -> Batch:
        using = torch.cuda.current_stream(self._device)
        using.wait_event(copied)
        for part in batch:
            part.record_stream(using)
        return batch


def loader(rows: InMemoryRows, sampler: Sampler[Any], copied_to: torch.device | None = None) -> DataLoader[Batch]:
    """Returns a DataLoader whose sampler yields whole batches (`batch_size=None`), in this process.

    Args:
        rows: the rows that batches are taken from.
        sampler: the sampler that yields the indices of each batch.
        copied_to: a GPU to which batches are copied ahead of their use; None leaves them where the rows are.
    """
    if copied_to is not None:
        return AheadLoader(rows, sampler, copied_to)
    return DataLoader(rows, batch_size=None, sampler=sampler, collate_fn=_as_is)
