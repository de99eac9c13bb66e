"""Python's garbage collector, which would look at every object of every library again and again while a run lasts."""

from __future__ import annotations

import gc


def spare_collections() -> bool:
    """Leaves what is alive now out of later collections; returns whether that was done.

    With the libraries of a training, a full collection takes some 0.3 s, and one is due every thousand steps or so.
    Where the user has switched collections off, or has set objects aside already, nothing is done. What is garbage by
    now is collected after the run.
    """
    if not gc.isenabled() or gc.get_freeze_count():
        return False
    gc.freeze()
    return True


def resume_collections() -> None:
    gc.unfreeze()
