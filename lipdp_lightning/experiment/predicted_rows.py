"""A module's predictions for the rows of a data module or of a table without labels, as columns by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..calibration.probabilities import log_probabilities
from ..data_modules.csv_table import SchemaTable
from ..training.predictions import class_scores, predict_rows

Columns = dict[str, "np.ndarray[Any, Any]"]


def predicted_rows(module: Any, data: Any, rows: str = "test") -> Columns:
    """Returns the predictions for a data module's test or validation rows, beside their targets.

    Args:
        module: The module, with its weights.
        data: The data module.
        rows: ``test`` or ``validation``.

    Returns:
        Columns by name: ``row``, ``target``, ``prediction`` and each class's probability. Classes are numbers; where
        the data module has names for them, ``target_name`` and ``prediction_name`` stand beside, and probabilities have
        these names. Numbers of a regression are in the declared units.
    """
    data.setup("test")
    loader = data.test_dataloader() if rows == "test" else data.val_dataloader()
    if not loader:
        raise ValueError(f"{type(data).__name__} has no {rows} rows of their own. HINT: use --rows test")
    outputs, targets, _ = predict_rows(module, data, loader)
    columns = {"row": np.arange(len(targets))} | _named("target", targets.reshape(-1), data)
    return columns | _predictions(module, data, outputs)


def predicted_table(module: Any, data: Any, table: Any) -> Columns:
    """Returns the predictions for a table of new rows, without targets; the private rows are not read.

    Args:
        module: The module, with its weights.
        data: The data module, whose schema declares the columns.
        table: The path of a CSV or Parquet file, or a DataFrame. A column with the label may be there, and is not read.

    Returns:
        The columns of :func:`predicted_rows` without targets. ``row`` counts the rows of the table from 0; a row is
        left out if the schema drops rows with a missing value and it has one.
    """
    if not isinstance(data, SchemaTable):
        raise ValueError(
            f"{type(data).__name__} has no schema of a table. HINT: leave the table out, and name other rows by the "
            "keys of data, such as --data.init_args.path new.npz."
        )
    x, kept = data.features_of(table)
    outputs, _, _ = predict_rows(module, data, _batches(x, data.eval_batch_size))
    return {"row": np.array(kept)} | _predictions(module, data, outputs)


def _batches(x: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for part, ids in zip(x.split(size), torch.arange(len(x)).split(size), strict=True):
        yield part, torch.zeros(len(part)), ids


def _predictions(module: Any, data: Any, outputs: Tensor) -> Columns:
    if module.task == "regression":
        return {"prediction": data.in_units(outputs.reshape(-1)).numpy()}
    shares = log_probabilities(class_scores(module, outputs), module.output_temperature).exp()
    names = data.class_names or range(shares.shape[1])
    columns = _named("prediction", shares.argmax(dim=1), data)
    return columns | {f"probability_{name}": shares[:, index].numpy() for index, name in enumerate(names)}


def _named(column: str, values: Tensor, data: Any) -> Columns:
    """Returns classes, with the column of their names if they have names; or numbers in the declared units."""
    if data.task == "regression":
        return {column: data.in_units(values).numpy()}
    found = {column: values.long().numpy()}
    if data.class_names is not None:
        found[f"{column}_name"] = np.array(data.class_names)[found[column]]
    return found
