"""Reads MNIST and Fashion-MNIST from the published idx files (`<root>/<name>/raw/`, torchvision's layout)."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lipdp_lightning.data_modules.base import PrivateDataModule, Rows, box_norm
from lipdp_lightning.data_modules.downloads import fetched, how_to_get
from lipdp_lightning.data_modules.found_files import data_root, find_file, read_bytes, refusal
from lipdp_lightning.data_modules.poisson import OnDevice
from lipdp_lightning.data_modules.splits import Split

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Returns the uint8 array of an idx file: two zero bytes, type, number of axes, their lengths, the values."""
    data = read_bytes(path)
    header = 4 + 4 * dimensions
    if len(data) < header or data[:4] != bytes((0, 0, _UNSIGNED_BYTE, dimensions)):
        raise refusal(f"{path} is not an idx file of bytes with {dimensions} axes", "fetch the original file again")
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    values = np.frombuffer(data, dtype=np.uint8, offset=header)
    expected = int(np.prod(shape, dtype=np.uint64))
    if values.size != expected:
        raise refusal(
            f"{path} announces {expected} values of shape {shape} and holds {values.size}",
            "fetch the file again",
        )
    return torch.from_numpy(values.reshape(shape).copy())


class IdxImages(PrivateDataModule):
    """Ten classes of 28 x 28 grey images, kept as bytes; pixels become [0, 1] by the public factor 1/255.

    The published test images are the validation rows when `validation_fraction` is 0: do not select on them.

    Args:
        root: the data folder; LIPDP_DATA by default.
        download: whether to fetch missing files, and to check the checksums of those that are there.
    """

    folder: str
    input_shape = (1, 28, 28)
    task = "classification"
    num_classes = 10
    declared_size = 60_000
    scale = 1 / 255
    input_bound = box_norm((1, 28, 28), 0.0, 1.0)

    def __init__(
        self,
        root: str | None = None,
        download: bool = False,
        validation_fraction: float | None = None,
        split: Split | None = None,
        eval_batch_size: int = 1024,
        on_device: OnDevice = "auto",
    ) -> None:
        super().__init__(validation_fraction, split, eval_batch_size, on_device)
        self.root, self.download = root, download

    def _file(self, name: str) -> Path:
        place = f"{self.folder}/raw/{name}-ubyte"
        hint = f"{how_to_get(f'{place}.gz')}; or set LIPDP_DATA to the root of torchvision.datasets.{self.folder}"
        root = data_root(self.root, f"{place}.gz", f"{how_to_get(f'{place}.gz')} once there is a folder")
        if self.download and not (root / place).is_file():
            return fetched(root, f"{place}.gz", hint)
        return find_file(root, place, hint)

    def where(self, part: str) -> str:
        return f"{data_root(self.root) / self.folder / 'raw'}, {part} images"

    def _read(self, part: str) -> Rows:
        place = self._file(f"{part}-images-idx3")
        images, labels = read_idx(place, 3), read_idx(self._file(f"{part}-labels-idx1"), 1)
        if len(images) != len(labels):
            raise refusal(
                f"{place.parent}: {len(images)} {part} images and {len(labels)} labels", "fetch both files again"
            )
        return images.unsqueeze(1), labels.long()

    def load_train(self) -> Rows:
        return self._read("train")

    def load_test(self) -> Rows:
        return self._read("t10k")

    def declarations(self) -> list[str]:
        return ["pixels are bytes, 0 to 255, by the file format"]


class MNIST(IdxImages):
    """Handwritten digits."""

    folder = "MNIST"


class FashionMNIST(IdxImages):
    """Pictures of clothing."""

    folder = "FashionMNIST"
