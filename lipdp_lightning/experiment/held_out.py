"""The metrics of a module on the held-out rows of its data."""

from __future__ import annotations

from typing import Any


def held_out_metrics(trainer: Any, module: Any, data: Any) -> dict[str, float]:
    """Returns the metrics on validation rows, and on test rows where those are other rows."""
    data.setup("test")
    validation = data.val_dataloader()
    try:
        test = data.test_dataloader()
    except ValueError:  # no held-out rows at all
        return {}
    metrics: dict[str, float] = {}
    if validation:
        # no result where the trainer's limit_val_batches is 0, as for private validation rows
        metrics |= (trainer.validate(module, datamodule=data, verbose=False) or [{}])[0]
    if not validation or test.dataset is not validation.dataset:
        metrics |= trainer.test(module, datamodule=data, verbose=False)[0]
    return {k: float(v) for k, v in metrics.items()}
