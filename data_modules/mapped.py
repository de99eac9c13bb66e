"""Reads arrays in `.npy` files that stay on disk; a batch reads its own rows and no others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lipdp_lightning.data_modules.base import PrivateDataModule, Rows, box_norm
from lipdp_lightning.data_modules.found_files import kind_of, refusal
from lipdp_lightning.data_modules.poisson import OnDevice
from lipdp_lightning.data_modules.splits import Split


class MappedArrays(PrivateDataModule):
    """`x.npy` and `y.npy` in a folder, and `x_test.npy` and `y_test.npy` if rows were published as held out.

    It is for data larger than memory. `x` is mapped: set-up and the fingerprint read it some rows at a time, and a
    batch reads its rows by `index_select`. It holds float32, clipped to the declared [low, high] as batches are read,
    or bytes (uint8), which are mapped onto the same range. Labels are read as a whole.

    Args:
        folder: the folder with the files; arrays of Python objects are refused, since reading them runs code.
        declared_size: N, the declared number of rows.
        input_shape: the shape of one row.
        task: classification, binary or regression.
        low: the declared lower end of every feature.
        high: the declared upper end of every feature.
        num_classes: the number of classes of a classification.
        target_bound: the largest absolute target of a regression.
    """

    mapped = True

    def __init__(
        self,
        folder: str,
        declared_size: int,
        input_shape: Sequence[int],
        task: str,
        low: float,
        high: float,
        num_classes: int | None = None,
        target_bound: float | None = None,
        validation_fraction: float | None = None,
        split: Split | None = None,
        eval_batch_size: int = 1024,
        on_device: OnDevice = "auto",
    ) -> None:
        super().__init__(validation_fraction, split, eval_batch_size, on_device)
        if not (np.isfinite(low) and np.isfinite(high) and low < high):
            raise refusal(f"low = {low} and high = {high} are not a finite range", "declare the range of the features")
        self.folder, self.low, self.high = Path(folder), float(low), float(high)
        self.declared_size, self.input_shape, self.task = declared_size, tuple(input_shape), task
        self.num_classes, self.target_bound = num_classes, target_bound
        self.scale, self.offset = (self.high - self.low) / 255, self.low
        self.input_bound = box_norm(self.input_shape, self.low, self.high)

    def where(self, part: str) -> str:
        return str(self.folder / ("x_test.npy" if part == "test" else "x.npy"))

    def load_train(self) -> Rows:
        return self._pair("x.npy", "y.npy")

    def load_test(self) -> Rows | None:
        return self._pair("x_test.npy", "y_test.npy") if (self.folder / "x_test.npy").exists() else None

    def transform_batch(self, x: Tensor) -> Tensor:
        """Returns bytes mapped onto the declared range, or floats clipped to it; a second call changes nothing."""
        return super().transform_batch(x) if x.dtype == torch.uint8 else x.clamp(self.low, self.high)

    def declarations(self) -> list[str]:
        return [f"every feature in [{self.low:g}, {self.high:g}], clipped as batches are read; x stays on disk"]

    def _pair(self, features: str, labels: str) -> Rows:
        x, y = self._array(features, mapped=True), self._array(labels, mapped=False)
        if y.dtype.kind not in "fiub":
            raise refusal(f"{self.folder / labels} holds {y.dtype}, not numbers", "save one label per row")
        whole = self.task != "regression" and y.dtype.kind != "f"
        return torch.from_numpy(x), torch.from_numpy(np.ascontiguousarray(y, dtype=np.int64 if whole else np.float32))

    def _array(self, name: str, mapped: bool) -> np.ndarray:
        path = self.folder / name
        if not path.is_file():
            raise refusal(f"there is no file {path}", f"write it with numpy.save('{name}', array)")
        with path.open("rb") as file:
            head = file.read(64)
        if not head.startswith(b"\x93NUMPY"):
            raise refusal(
                f"{path} is {kind_of(head) or ('empty' if not head else 'not an .npy file')}",
                f"write it with numpy.save('{name}', array)",
            )
        try:
            # copy on write: torch needs writable memory, and the file does not change
            array = np.load(path, mmap_mode="c" if mapped else None, allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise refusal(f"{path} cannot be read: {str(error).splitlines()[0]}", "write it again") from None
        if not array.ndim:
            raise refusal(f"{path} holds a single number", "save one row per record")
        if mapped and (array.dtype not in (np.float32, np.uint8) or not array.flags.c_contiguous):
            order = "" if array.flags.c_contiguous else " in Fortran order"
            raise refusal(
                f"{path} holds {array.dtype}{order}: mapped features are float32 or uint8, row by row",
                "numpy.save(path, numpy.ascontiguousarray(x, dtype=numpy.float32))",
            )
        return array
