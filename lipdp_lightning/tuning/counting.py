"""Counts the held-out rows that a model classifies correctly, a count that one row moves by at most one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..training.batches import defined_here
from ..training.model_checks import DATA_METHODS
from ..training.predictions import predict_rows


def correct_rows(module: Any, data: Any) -> int:
    """Returns the number of validation rows that the module classifies correctly, each of them counted once.

    It is counted here, row by row, and not derived from a metric of the trainer: a mean over some of the rows, a
    weighted mean, or one over rows that are seen several times would move by more than one row's share. A data module's
    own hook is given every row by itself.

    Raises:
        ValueError: if the data module does not give every validation row exactly once.
    """
    loader = data.val_dataloader()
    if isinstance(loader, list | tuple | dict):
        raise ValueError(
            f"{type(data).__name__} has {len(loader)} validation loaders, and a count is of one. "
            "HINT: use one loader that gives every validation row once, or --public-validation if they are public."
        )
    apart = not all(defined_here(data, name) for name in DATA_METHODS)
    outputs, targets, ids = predict_rows(module, data, loader, apart=apart)
    seen, rows = len(ids.unique()), len(loader.dataset)
    if not seen == len(ids) == rows == len(outputs):
        raise ValueError(
            f"{type(data).__name__} gives {len(ids)} validation rows, {seen} of them different, out of {rows}: a row "
            "could move the count by more than one. HINT: use a loader that gives every row once and leaves none out."
        )
    return int((_classes(module.task, outputs) == targets.reshape(-1)).sum())


def _classes(task: str, outputs: Tensor) -> Tensor:
    return (outputs.reshape(-1) > 0).long() if task == "binary" else outputs.argmax(1)
