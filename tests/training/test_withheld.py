"""Errors of a training tell nothing about the rows: neither their number nor a value, wherever they are raised."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import Blobs, fit, make_module, make_plan
from torch import Tensor, nn
from torch.utils.data import Dataset

from lipdp_lightning.adoption.given_rows import GivenRows
from lipdp_lightning.bounds.losses import Loss
from lipdp_lightning.files import write_bytes_atomically
from lipdp_lightning.training.withheld import withhold

SECRETS = ("0.7310585", "4711")


@dataclass(frozen=True)
class Failing(Loss):
    """Works on the zeros that set-up makes up, and fails on rows."""

    action: Callable[[Tensor, Tensor], Any] | None = None

    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(logits, target, reduction="none")
        if bool(target.any()):
            assert self.action is not None
            self.action(logits, target)
        return losses

    def lipschitz(self, shape: tuple[int, ...]) -> float:
        return 2.0**0.5


def shapes(logits: Tensor, target: Tensor) -> Any:
    return logits @ torch.ones(len(logits) + 1, 4711)


def index(logits: Tensor, target: Tensor) -> Any:
    return logits[4711]


def value(logits: Tensor, target: Tensor) -> Any:
    raise ValueError(f"cannot use {SECRETS[0]}. HINT: 4711")


def chain(logits: Tensor, target: Tensor) -> Any:
    try:
        {}["4711"]
    except KeyError as error:
        raise RuntimeError(SECRETS[0]) from error


def decoding(logits: Tensor, target: Tensor) -> Any:
    b"4711\xff".decode()


def noted(logits: Tensor, target: Tensor) -> Any:
    error = TypeError("4711")
    error.add_note(SECRETS[0])
    raise error


def image(logits: Tensor, target: Tensor) -> Any:
    raise OSError("cannot identify image file 4711")  # as PIL does, of a row that was drawn


@pytest.mark.parametrize("action", [shapes, index, value, chain, decoding, noted, image], ids=lambda a: a.__name__)
def test_an_error_in_a_step_says_where_and_not_what(action: Any) -> None:
    with pytest.raises(Exception, match=r"withheld.*HINT|reason|withheld") as caught:
        fit(make_plan(steps=2), module=make_module(loss=Failing(action)))
    shown = "".join(traceback.format_exception(caught.value))
    message = "\n".join(line for line in shown.splitlines() if not line.startswith("    "))
    assert not any(secret in message for secret in SECRETS), message
    assert not any(f"{rows}x" in message or f"[{rows}" in message for rows in range(1, 61)), message
    assert "test_withheld.py" in message


class Fails(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        raise IndexError(f"{len(batch[0])} rows, 4711")


class Short(Blobs):
    def transform_batch(self, x: Tensor) -> Tensor:
        return x if not bool(x.any()) else x.reshape(4711, -1)


def test_errors_of_callbacks_and_of_data_are_withheld_too() -> None:
    for options in ({"data": Short()}, {}):
        callbacks = () if options else (Fails(),)
        with pytest.raises((IndexError, RuntimeError), match=r"^(?!.*4711).*withheld.*HINT"):
            fit(make_plan(steps=2), *callbacks, **options)


class Opens(Blobs):
    def transform_batch(self, x: Tensor) -> Tensor:
        if bool(x.any()):
            os.replace("/nowhere/4711.png", "/nowhere/4711.jpg")
        return x


class Files(Dataset[Any]):
    """A project's rows, of which the last, which a template does not need, cannot be read."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action

    def __len__(self) -> int:
        return 60

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        if row == 59:
            self.action()
        return torch.rand(4), row % 3


@pytest.mark.parametrize("fails", [lambda: os.stat("/nowhere/4711.png"), lambda: {}["4711"], lambda: int("a4711")])
def test_names_of_files_that_hold_rows_are_withheld(fails: Callable[[], Any]) -> None:
    with pytest.raises(OSError, match=r"^(?!.*4711)FileNotFoundError in transform_batch.*withheld.*HINT"):
        fit(make_plan(steps=2), data=Opens())
    rows = GivenRows.of(Files(fails))
    assert rows.template()[0].shape == (1, 4)
    with pytest.raises((OSError, LookupError, ValueError), match=r"^(?!.*4711).* in .*withheld.*HINT"):
        rows.tensors(0, 1)


class Refuses(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.network[0].weight.requires_grad_(False)


class Writes(Callback):
    """Its file cannot be written, since its folder is a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        (self.folder / "file").touch()
        write_bytes_atomically(self.folder / "file" / "nowhere", b"")


def test_refusals_of_the_library_and_errors_of_files_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"what is trained changed after set-up.*HINT"):
        fit(make_plan(steps=2), Refuses())
    with pytest.raises(OSError, match=r"file/nowhere cannot be written: File exists\. .*HINT") as caught:
        fit(make_plan(steps=2), Writes(tmp_path))
    assert "withheld" not in str(caught.value)
    full = OSError(28, "No space left on device", "last.ckpt")
    withhold(full)
    assert str(full) == "[Errno 28] No space left on device: 'last.ckpt'"


def test_memory_that_ends_has_a_hint_of_its_own() -> None:
    error = torch.OutOfMemoryError("tried to allocate 4711 bytes")
    withhold(error)
    assert "4711" not in str(error) and "physical_batch_size" in str(error)
