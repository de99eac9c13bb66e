"""MNIST's file format on small generated files; the real archives when LIPDP_DATA is set."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from lipdp_lightning.data_modules.idx_images import MNIST, FashionMNIST, read_idx

needs_data = pytest.mark.skipif(not os.environ.get("LIPDP_DATA"), reason="LIPDP_DATA is not set")


class Small(MNIST):
    declared_size = 12


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write(root: Path, train: int = 12, test: int = 6, packed: bool = True) -> np.ndarray:
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    images: dict[str, np.ndarray] = {}
    for part, count in (("train", train), ("t10k", test)):
        images[part] = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        files = {"images-idx3": images[part], "labels-idx1": np.arange(count, dtype=np.uint8) % 10}
        for name, array in files.items():
            data = idx(array)
            path = raw / f"{part}-{name}-ubyte"
            (path.with_name(path.name + ".gz") if packed else path).write_bytes(gzip.compress(data) if packed else data)
    return images["train"]


@pytest.mark.parametrize("packed", [True, False])
def test_images_and_labels_are_read_as_written(tmp_path: Path, packed: bool) -> None:
    images = write(tmp_path, packed=packed)
    module = Small(root=str(tmp_path))
    module.setup()
    rows = module._train
    assert rows is not None and rows.x.dtype == torch.uint8
    assert np.array_equal(rows.x[:, 0].numpy(), images) and rows.y.tolist() == [*range(10), 0, 1]
    x, _, _ = module.on_after_batch_transfer(next(iter(module.val_dataloader())), 0)
    assert x.shape == (6, 1, 28, 28) and x.dtype == torch.float32 and x.min() >= 0 and x.max() <= 1.0 + 1e-6


def replace(root: Path, name: str, data: bytes) -> None:
    (root / "MNIST" / "raw" / f"{name}-ubyte.gz").write_bytes(data)


BAD = {
    "not_gzip": ("train-images-idx3", b"plain", "named .gz and is something else"),
    "not_idx": ("train-images-idx3", gzip.compress(b"hello, world, how are you"), "not an idx file"),
    "labels_for_images": ("train-images-idx3", gzip.compress(idx(np.zeros(9, np.uint8))), "with 3 axes"),
    "cut": ("train-images-idx3", gzip.compress(idx(np.zeros((12, 28, 28), np.uint8))[:-1]), "announces 9408"),
    "long": ("train-images-idx3", gzip.compress(idx(np.zeros((12, 28, 28), np.uint8)) + b"x"), "holds 9409"),
    "counts": ("train-labels-idx1", gzip.compress(idx(np.zeros(11, np.uint8))), "12 train images and 11 labels"),
    "label": ("train-labels-idx1", gzip.compress(idx(np.full(12, 10, np.uint8))), "row 0 has label 10"),
    "huge": ("train-labels-idx1", gzip.compress(bytes((0, 0, 8, 1)) + b"\xff" * 4), "announces 4294967295"),
    "size": ("train-images-idx3", gzip.compress(idx(np.zeros((12, 27, 28), np.uint8))), "input_shape declares"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named(case: str, tmp_path: Path) -> None:
    write(tmp_path)
    name, data, message = BAD[case]
    replace(tmp_path, name, data)
    with pytest.raises(ValueError) as caught:
        Small(root=str(tmp_path)).setup()
    first, hint = str(caught.value).split("\n")
    assert message in first and hint.startswith("HINT: ")


def test_a_missing_file_is_named_with_the_way_to_get_it(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(
        ValueError, match=r"t10k-labels-idx1-ubyte.*\nHINT: download: true fetches it .*torchvision.datasets.MNIST"
    ):
        Small(root=str(tmp_path)).setup()


def test_another_number_of_images_than_declared_is_refused(tmp_path: Path) -> None:
    write(tmp_path, train=9)
    with pytest.raises(ValueError, match="12 rows are declared and fewer exist"):
        Small(root=str(tmp_path)).setup()


def test_read_idx_keeps_axes(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    (tmp_path / "a").write_bytes(idx(array))
    assert np.array_equal(read_idx(tmp_path / "a", 3).numpy(), array)


@needs_data
@pytest.mark.parametrize("kind, counts", [(MNIST, [5923, 6742, 5958]), (FashionMNIST, [6000, 6000, 6000])])
def test_the_real_archives(kind: type[MNIST], counts: list[int]) -> None:
    module = kind()
    module.setup()
    assert module.rows == 60_000 and len(module._test) == 10_000  # type: ignore[arg-type]
    assert torch.bincount(module._train.y)[:3].tolist() == counts  # type: ignore[union-attr]
