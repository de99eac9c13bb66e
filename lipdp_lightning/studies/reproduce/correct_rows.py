"""Records as text which held-out rows a training classifies correctly, and computes the error of a difference from
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor


class CorrectRows(Callback):
    """Collects, in the order of the loader, whether each held-out row of the last evaluation was classified
    correctly.
    """

    def __init__(self) -> None:
        self._found: list[Tensor] = []

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._found = []

    def on_test_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._found = []

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        scores, labels = outputs["outputs"], batch[1]
        binary = pl_module.task == "binary"
        predicted = scores.reshape(-1) > 0 if binary else scores.argmax(dim=1)
        self._found.append((predicted == labels.reshape(-1)).cpu())

    on_test_batch_end = on_validation_batch_end

    def text(self) -> str:
        """Returns the number of rows, and one bit for each in hexadecimal digits."""
        rows = torch.cat(self._found).numpy()
        return f"{len(rows)}:{np.packbits(rows).tobytes().hex()}"


def rows_of(text: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Inverts ``CorrectRows.text``."""
    count, digits = text.split(":")
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(digits), dtype=np.uint8))
    return bits[: int(count)].astype(bool)


def error_of_difference(first: Sequence[str], second: Sequence[str]) -> float:
    """Returns the standard error of the difference of two mean accuracies, over random seeds and rows.

    Two trainings of the same seed, on the same rows, are a pair. For d[seed, row], the difference of a pair on a row,
    the variance of the mean is Var(seed means) / seeds + Var(row means) / rows - Var(residuals) / (seeds rows), since
    the residuals are in both of the first two.
    """
    differences = np.stack([rows_of(a).astype(float) - rows_of(b) for a, b in zip(first, second, strict=True)])
    seeds, rows = differences.shape
    by_seed, by_row = differences.mean(axis=1), differences.mean(axis=0)
    residuals = differences - by_seed[:, None] - by_row[None, :] + differences.mean()
    residual = float((residuals**2).sum()) / ((seeds - 1) * (rows - 1))
    variance = float(by_seed.var(ddof=1)) / seeds + float(by_row.var(ddof=1)) / rows - residual / (seeds * rows)
    return math.sqrt(max(0.0, variance))
