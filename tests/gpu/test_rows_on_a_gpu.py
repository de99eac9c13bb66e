"""Where the training rows lie, and what a step copies to the device: data_modules/base.py::PrivateDataModule.place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pretend
import pytest
import torch
from pretend import DEVICE, OnGpu, pretended_gpu
from torch import Tensor

from lipdp_lightning.data_modules import MappedArrays
from lipdp_lightning.data_modules.base import PrivateDataModule

ROWS, SHAPE = 50, (3, 8, 8)
BYTES_OF_A_ROW = 3 * 8 * 8 + 8


class Photos(PrivateDataModule):
    """Random images in bytes."""

    input_shape, task, num_classes, declared_size = SHAPE, "classification", 4, 50
    scale, offset = 1 / 255, -0.5

    def load_train(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (ROWS, *SHAPE), dtype=torch.uint8, generator=generator)
        return x, torch.randint(0, 4, (ROWS,), generator=generator)


def draw(step: int, chunk: int) -> Tensor:
    return torch.arange(step, ROWS, 7 + chunk)


def batches(data: Any, steps: int = 2) -> list[tuple[Tensor, ...]]:
    """The micro-batches of some steps as the network receives them."""
    data.bind(draw, steps, 2, lambda: 0)
    arrived = []
    for batch in data.train_dataloader():
        moved = tuple(part.to(DEVICE, non_blocking=True) if data.placed else part for part in batch)
        arrived.append(data.on_after_batch_transfer(moved, 0))
    return arrived


def prepared(on_device: Any = "auto", where: torch.device | None = None, kind: Any = Photos) -> Any:
    data = kind(on_device=on_device)
    data.setup()
    data.placed = where is not None
    data.where = data.place(where or torch.device("cpu"))
    return data


def same(first: list[tuple[Tensor, ...]], second: list[tuple[Tensor, ...]]) -> bool:
    plain = [[part.inner if isinstance(part, OnGpu) else part for part in batch] for batch in first]
    pairs = zip(plain, second, strict=True)
    return all(
        torch.equal(a, b) and a.dtype == b.dtype for one, other in pairs for a, b in zip(one, other, strict=True)
    )


def test_rows_on_the_device_are_the_same_and_only_their_numbers_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    host = prepared()
    expected = batches(host)
    with pretended_gpu(monkeypatch) as counts:
        data = prepared(where=DEVICE)
        assert data.where == "on cuda:0, 0.0 MB by their declared number" and isinstance(data._train.x, OnGpu)
        assert data._train.x.dtype == torch.uint8, "they are bytes on the device"
        counts.clear()
        found = batches(data)
        drawn = sum(len(batch[2]) for batch in found)
        assert counts.to_device == 2 * 8 * drawn and counts.waits == 0 and counts.to_host == 0
    assert same(found, expected)
    assert data.fingerprint() == host.fingerprint(), "the noise is keyed by the same data"


@pytest.mark.parametrize("reason", ["it was asked for", "they do not fit"])
def test_other_rows_are_copied_in_bytes_from_pinned_memory(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = batches(prepared())
    asked = reason == "it was asked for"
    with pretended_gpu(monkeypatch) as counts:
        if not asked:
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * 50 * BYTES_OF_A_ROW - 1, 80 << 30))
        data = prepared(False if asked else "auto", DEVICE)
        assert data.where.startswith("copied to cuda:0 batch by batch")
        log = note_streams(monkeypatch)
        counts.clear()
        found = batches(data)
        drawn = sum(len(batch[2]) for batch in found)
        assert counts.to_device == drawn * (BYTES_OF_A_ROW + 8) and counts.waits == 0
    assert same(found, expected)
    copies = [f"copy {number}" for number in range(4)]
    used = [[f"use waits for copy {number}", *[f"kept for use: {number}"] * 3] for number in range(4)]
    assert log == [
        *copies[:2], *used[0], copies[2], *used[1], copies[3], *used[2], *used[3]
    ], "every copy but the first begins before the batch before it is handed over"  # fmt: skip


def note_streams(patch: pytest.MonkeyPatch) -> list[str]:
    """Notes in which order copies begin on the stream of copies, and what the stream that uses them waits for."""
    log: list[str] = []
    waited, inside = [0], [False]

    def record_event() -> str:
        assert inside[0]
        log.append(f"copy {sum(words.startswith('copy') for words in log)}")
        return log[-1]

    @contextlib.contextmanager
    def entered(stream: Any) -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    def wait_event(event: str) -> None:
        waited[0] = int(event.split()[-1])
        log.append(f"use waits for {event}")

    using = SimpleNamespace(wait_event=wait_event)
    patch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(record_event=record_event))
    patch.setattr(torch.cuda, "stream", entered)
    patch.setattr(torch.cuda, "current_stream", lambda device: using)

    def kept(tensor: Tensor, stream: Any) -> None:
        assert isinstance(tensor, OnGpu) and stream is using
        log.append(f"kept for use: {waited[0]}")

    patch.setattr(OnGpu, "record_stream", kept, raising=False)
    return log


def test_the_decision_rests_on_the_declared_size_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fewer(Photos):
        def load_train(self) -> tuple[Tensor, Tensor]:
            x, y = super().load_train()
            return x[:-1], y[:-1]

    limit = 2 * 50 * BYTES_OF_A_ROW
    with pretended_gpu(monkeypatch):
        for free, expected in ((limit - 1, "copied"), (limit, "on")):
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 80 << 30))
            found = {prepared(where=DEVICE, kind=kind).where for kind in (Photos, Fewer)}
            assert len(found) == 1 and found.pop().split()[0] == expected
    assert limit < pretend.FREE_MEMORY


def test_rows_in_a_file_stay_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", np.zeros((9, 3), dtype=np.float32))
    np.save(tmp_path / "y.npy", np.zeros(9, dtype=np.int64))

    def mapped(on_device: Any) -> MappedArrays:
        return MappedArrays(str(tmp_path), 9, (3,), "classification", 0.0, 1.0, num_classes=2, on_device=on_device)

    assert mapped("auto").place(torch.device("cpu")).startswith("in their file")
    with pretended_gpu(monkeypatch):
        assert mapped("auto").place(DEVICE).startswith("copied to cuda:0")
        with pytest.raises(ValueError, match=r"its rows stay in their file\nHINT: use on_device: auto"):
            mapped(True).place(DEVICE)
