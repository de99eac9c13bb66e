"""The progress of Lightning's loops after a number of steps of a plan."""

from __future__ import annotations

from typing import Any


def continue_after(loops: dict[str, Any], step: int, strategy: Any) -> None:
    """Changes the saved progress of Lightning's fit loop to that after a whole number of steps.

    Lightning saves how far the hooks of an epoch have come, and where ``max_steps`` is given, it takes an epoch that
    has ended for one that was interrupted: it runs the epoch again without a batch and counts it twice, so that a run
    of a given number of epochs ends before its last steps. Here the counters follow from the number of the step alone,
    so that a run continues with the next one whichever hook has saved its checkpoint.

    Args:
        loops: The saved progress, which is changed in place.
        step: The number of steps that were taken.
        strategy: The Strategy that takes the steps.
    """
    from .set_up import steps_per_epoch  # which knows the module, and the module knows checkpoints

    if step == 0 or strategy.plan is None:  # nothing has been counted yet, or nothing is trained
        return
    of_epoch, chunks = steps_per_epoch(strategy.plan), strategy.chunks
    epochs, inside = divmod(step, of_epoch)
    begun = epochs + (inside > 0)
    batches = (inside or of_epoch) * chunks
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
