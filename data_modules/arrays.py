"""Reads arrays from an `.npz` file, with declared bounds."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from lipdp_lightning.data_modules.base import PrivateDataModule, Rows, box_norm
from lipdp_lightning.data_modules.found_files import refusal, refused_zip
from lipdp_lightning.data_modules.poisson import OnDevice
from lipdp_lightning.data_modules.splits import Split


class NpzArrays(PrivateDataModule):
    """Arrays `x` and `y`, and `x_test` and `y_test` if rows were published as held out.

    Floats are clipped to the declared [low, high] and stored as float32; bytes (uint8) are kept and become `x * scale +
    offset`, where `scale` and `offset` map 0..255 onto [low, high].

    Args:
        path: the file; arrays of Python objects are refused, since reading them runs code.
        declared_size: N, the declared number of rows.
        input_shape: the shape of one row.
        task: classification, binary or regression.
        low: the declared lower end of every feature.
        high: the declared upper end of every feature.
        num_classes: the number of classes of a classification.
        target_bound: the largest absolute target of a regression.
    """

    def __init__(
        self,
        path: str,
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
        self.path, self.low, self.high = Path(path), float(low), float(high)
        self.declared_size, self.input_shape, self.task = declared_size, tuple(input_shape), task
        self.num_classes, self.target_bound = num_classes, target_bound
        self.scale, self.offset = (self.high - self.low) / 255, self.low
        self.input_bound = box_norm(self.input_shape, self.low, self.high)

    def where(self, part: str) -> str:
        return f"{self.path}, {part} rows"

    def _arrays(self, *names: str) -> list[np.ndarray] | None:
        if not self.path.is_file():
            raise refusal(f"there is no file {self.path}", "check the path")
        if not zipfile.is_zipfile(self.path):
            raise refusal(f"{self.path} is {refused_zip(self.path)}", "write it with numpy.savez(path, x=x, y=y)")
        try:
            with np.load(self.path, allow_pickle=False) as archive:
                missing = [name for name in names if name not in archive.files]
                found = [archive[name] for name in names if name not in missing]
        except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
            problem = str(error).splitlines()[0]
            raise refusal(
                f"{self.path} cannot be read: {problem}", "write it with numpy.savez(path, x=x, y=y)"
            ) from None
        if found and missing:
            raise refusal(
                f"{self.path} has an array {', '.join(set(names) - set(missing))} and no {', '.join(missing)}",
                "features and labels belong together: numpy.savez(path, x=x, y=y, x_test=x_test, y_test=y_test)",
            )
        # a member that is not an array is returned as its bytes
        if not all(isinstance(array, np.ndarray) for array in found):
            raise refusal(f"{self.path}: {' and '.join(names)} must be arrays", "write it with numpy.savez")
        return found or None

    def _rows(self, arrays: list[np.ndarray]) -> Rows:
        x, y = arrays
        numbers = [array.dtype.kind in "fiub" for array in arrays]
        if not all(numbers) or not all(array.ndim for array in arrays):
            raise refusal(f"{self.path}: x and y must be arrays of numbers", "give one row of x and of y per record")
        if x.dtype != np.uint8:
            # a non-finite entry passes through the clip and is refused, with its row, in set-up
            x = np.where(np.isfinite(x), np.clip(x, self.low, self.high), x).astype(np.float32)
        whole = self.task != "regression" and y.dtype.kind != "f"
        return torch.from_numpy(x), torch.from_numpy(y.astype(np.int64 if whole else np.float32))

    def load_train(self) -> Rows:
        arrays = self._arrays("x", "y")
        if arrays is None:
            raise refusal(f"{self.path} has no arrays x and y", "write it with numpy.savez(path, x=x, y=y)")
        return self._rows(arrays)

    def load_test(self) -> Rows | None:
        arrays = self._arrays("x_test", "y_test")
        return None if arrays is None else self._rows(arrays)

    def declarations(self) -> list[str]:
        return [f"every feature in [{self.low:g}, {self.high:g}]"]
