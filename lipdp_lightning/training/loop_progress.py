"""The progress of Lightning's loops after a number of steps of a plan."""

from __future__ import annotations

from typing import Any


def progress_after(loops: dict[str, Any], step: int, steps_per_epoch: int, chunks: int) -> None:
    """Changes the saved progress of Lightning's fit loop to that after a whole number of steps.

    Lightning saves how far the hooks of an epoch have come, and where ``max_steps`` is given, it takes an epoch that
    has ended for one that was interrupted: it runs the epoch again without a batch and counts it twice, so that a run
    of a given number of epochs ends before its last steps. Here the counters follow from the number of the step alone,
    so that a run continues with the next one whichever hook has saved its checkpoint.

    Args:
        loops: The saved progress, which is changed in place.
        step: The number of steps that were taken.
        steps_per_epoch: The steps of an epoch.
        chunks: The micro-batches of a step.
    """
    if step == 0:  # nothing has been counted yet
        return
    epochs, inside = divmod(step, steps_per_epoch)
    begun = epochs + (inside > 0)
    batches = (inside or steps_per_epoch) * chunks
    # `completed` is one less: Lightning continues exactly from the state in which a batch has just ended
    loops["epoch_progress"] = {
        part: {"ready": begun, "started": begun, "processed": epochs, "completed": epochs}
        for part in ("total", "current")
    }
    loops["epoch_loop.batch_progress"] = {
        part: {"ready": number, "started": number, "processed": number, "completed": number - 1}
        for part, number in (("total", step * chunks), ("current", batches))
    } | {"is_last_batch": False}
    loops["epoch_loop.state_dict"] = {**loops["epoch_loop.state_dict"], "_batches_that_stepped": step - 1}
