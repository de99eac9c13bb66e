"""Arrays that stay on disk: the batches are those of arrays in memory, and the file is not read for them as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lipdp_lightning.data_modules.arrays import NpzArrays
from lipdp_lightning.data_modules.mapped import MappedArrays

X = np.random.default_rng(0).normal(size=(60, 2, 3)).astype(np.float32)
Y = np.arange(60) % 3
OPTIONS: dict[str, Any] = {
    "declared_size": 60,
    "input_shape": (2, 3),
    "task": "classification",
    "low": -1.0,
    "high": 1.0,
    "num_classes": 3,
}


def saved(folder: Path, **arrays: Any) -> Path:
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def batches(module: Any) -> list[Any]:
    module.bind(lambda step, chunk: torch.tensor([3, 0, 17])[: step + 1], 3, 1, lambda: 0)
    loaded = [*module.train_dataloader(), *module.val_dataloader()]
    return [module.on_after_batch_transfer(batch, 0) for batch in loaded]


@pytest.mark.parametrize("x", [X, np.clip(X * 60 + 120, 0, 255).astype(np.uint8)], ids=["floats", "bytes"])
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_batches_are_those_of_the_same_arrays_in_memory(x: np.ndarray, share: float, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=x.clip(-1, 1) if x.dtype == np.float32 else x, y=Y)
    mapped = MappedArrays(str(saved(tmp_path, x=x.clip(-1, 1) if x.dtype == np.float32 else x, y=Y)), **OPTIONS)
    memory = NpzArrays(str(tmp_path / "a.npz"), **OPTIONS)
    for module in (mapped, memory):
        module.validation_fraction = share
    for ours, theirs in zip(batches(mapped), batches(memory), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert mapped.fingerprint() == memory.fingerprint() and mapped.rows == memory.rows


def test_values_beyond_the_declared_range_are_clipped_in_every_batch(tmp_path: Path) -> None:
    module = MappedArrays(str(saved(tmp_path, x=X, y=Y)), **OPTIONS)
    assert np.abs(X).max() > 1
    got = torch.cat([x for x, *_ in batches(module)])
    assert float(got.abs().max()) <= 1 and float(got.flatten(1).norm(dim=1).max()) <= module.input_bound
    assert torch.equal(module.transform_batch(got), got)


def test_the_rows_are_a_view_of_the_file_and_not_a_copy(tmp_path: Path) -> None:
    """What is written into the file later arrives in the next batch: it was not loaded. The file is never written."""
    module = MappedArrays(str(saved(tmp_path, x=X, y=Y)), **OPTIONS, validation_fraction=0.25)
    before = (tmp_path / "x.npy").read_bytes()
    first = next(iter(batches(module)))[0].clone()
    file = np.load(tmp_path / "x.npy", mmap_mode="r+")
    file += 0.25
    file.flush()
    again = batches(module)[0][0]
    assert torch.allclose(again, (torch.from_numpy(X)[module._train.index[3]] + 0.25).clamp(-1, 1))  # type: ignore
    assert not torch.equal(first, again)
    file -= 0.25
    assert len((tmp_path / "x.npy").read_bytes()) == len(before)


def test_the_fingerprint_covers_rows_beyond_the_first_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lipdp_lightning.data_modules import poisson

    prints = []
    for change in (0.0, 1e-3):
        x = X.copy()
        x[59, 1, 2] += change
        whole = MappedArrays(str(saved(tmp_path, x=x, y=Y)), **OPTIONS).fingerprint()
        with monkeypatch.context() as patch:
            by_tens = lambda rows, like: (slice(i, min(i + 10, rows)) for i in range(0, rows, 10))  # noqa: E731
            patch.setattr(poisson, "slices", by_tens)
            prints.append(MappedArrays(str(tmp_path), **OPTIONS).fingerprint())
        assert prints[-1] == whole
    assert prints[0] != prints[1]


def test_a_bad_value_is_found_in_any_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lipdp_lightning.data_modules import row_checks

    x = X.copy()
    x[47, 1, 0] = np.nan
    by_tens = lambda rows, like: (slice(i, min(i + 10, rows)) for i in range(0, rows, 10))  # noqa: E731
    monkeypatch.setattr(row_checks, "slices", by_tens)
    with pytest.raises(ValueError, match=r"x\.npy: row 47, column \(1, 0\) is nan \(1 such rows\)"):
        MappedArrays(str(saved(tmp_path, x=x, y=Y)), **OPTIONS).setup()


BAD = {
    "text": (b"a,b\n1,2\n", "is not an .npy file"),
    "page": (b"<!DOCTYPE html><p>404", "is an HTML page"),
    "empty": (b"", "is empty"),
    "zip": (b"PK\x03\x04....", "is a zip archive"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_not_what_its_name_says(name: str, tmp_path: Path) -> None:
    content, message = BAD[name]
    saved(tmp_path, y=Y)
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(ValueError, match=rf"x\.npy {message}\nHINT"):
        MappedArrays(str(tmp_path), **OPTIONS).setup()


@pytest.mark.parametrize(
    "x, message",
    [
        (X.astype(np.float64), "holds float64: mapped features"),
        (np.asfortranarray(X), "holds float32 in Fortran order"),
        (np.array([{}] * 60, dtype=object), "cannot be read"),
        (X[:, :, :2], r"rows have shape \(2, 2\)"),
        (X[:50], "features and labels have different numbers of rows"),
    ],
)
def test_arrays_that_cannot_be_mapped_are_refused(x: np.ndarray, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        MappedArrays(str(saved(tmp_path, x=x, y=Y)), **OPTIONS).setup()


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    whole = (saved(tmp_path, x=X, y=Y) / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(whole[:-40])
    with pytest.raises(ValueError, match=r"x\.npy cannot be read.*\nHINT"):
        MappedArrays(str(tmp_path), **OPTIONS).setup()
