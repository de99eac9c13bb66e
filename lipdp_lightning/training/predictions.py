"""Outputs of a module for held-out or public rows, and the temperature that is stored beside its weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import read_json

TEMPERATURE_FILE = "temperature.json"


def loss_temperature(module: Any) -> float:
    """Returns the temperature by which the loss divides logits; 1 if it has none."""
    loss = getattr(module.loss, "loss", module.loss)
    return float(getattr(loss, "temperature", 1.0))


def class_scores(module: Any, outputs: Tensor) -> Tensor:
    """Returns the logits that the loss turns into probabilities; a binary task has one per row."""
    scores = outputs.double() / loss_temperature(module)
    return scores.reshape(-1) if module.task == "binary" else scores


@torch.no_grad()
def predict_rows(
    module: Any, data: Any, loader: Any, most: int | None = None, apart: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns outputs in evaluation mode, targets and ids of a loader's rows, on the CPU.

    Args:
        module: The module.
        data: The data module, whose hook changes batches on their way.
        loader: Yields batches ``(x, y, ids)``.
        most: The number of rows to predict, the first ones; None for all.
        apart: Whether the hook is given each row by itself, so that no row changes another.
    """
    was_training = module.training
    module.eval()
    # a float64 network takes float64 rows; mixed precision is not used here
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    parts: list[tuple[Tensor, ...]] = []
    try:
        for batch in loader:
            rows = [tensor[:most].to(module.device) for tensor in batch]
            given = zip(*(tensor.split(1) for tensor in rows), strict=True) if apart else [rows]
            changed = [data.on_after_batch_transfer(list(part), 0) for part in given]
            x, y, ids = (torch.cat(column) for column in zip(*changed, strict=True)) if apart else changed[0]
            parts.append((module(x.to(dtype)).cpu(), y.cpu(), ids.cpu()))
            if most is not None:
                break
    finally:
        module.train(was_training)
    if not parts:
        raise ValueError(f"{type(data).__name__} gives no rows. HINT: set validation_fraction, or implement load_test.")
    outputs, targets, ids = (torch.cat(column) for column in zip(*parts, strict=True))
    return outputs, targets, ids


def held_out_labels(loader: Any) -> Tensor:
    """Returns the labels of a loader's rows, without reading features from a file if possible."""
    rows = loader.dataset
    if hasattr(rows, "y") and hasattr(rows, "index"):
        labels: Tensor = rows.y if rows.index is None else rows.y[rows.index]
        return labels
    return torch.cat([batch[1] for batch in loader])


def read_temperature(directory: str | Path | None) -> dict[str, Any] | None:
    """Returns the stored temperature scaling of a run directory, or None if there is none."""
    file = None if directory is None else Path(directory) / TEMPERATURE_FILE
    if file is None or not file.exists():
        return None
    try:
        content = read_json(file)
        value = content["temperature"]
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise ValueError(f"temperature {value!r} is not positive")
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(
            f"{file} cannot be read ({error}). HINT: restore it from a backup; without it the run's probabilities "
            "change, and a second fit on private rows would spend its epsilon again."
        ) from error
    return dict(content)
