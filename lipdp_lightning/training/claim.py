"""The claim of a run directory, after every check and before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..privacy.plan import PrivacyPlan
from .checkpoint_files import read_checkpoint
from .run_directory import RunDirectory


def claim_run(
    directory: RunDirectory, plan: PrivacyPlan, is_first: bool, check: Callable[[], None],
    check_fits: Callable[[Mapping[str, Any]], None], config: str,
) -> Path | None:  # fmt: skip
    """Checks everything, then takes the run directory.

    Nothing has been written before this point, so that a refused run leaves nothing behind.

    Args:
        directory: The run directory.
        plan: The plan of the run.
        is_first: Whether this process is the one that writes.
        check: Raises ValueError if the set-up cannot be trained privately.
        check_fits: Raises ValueError if a checkpoint belongs to another model or optimizer.
        config: The configuration of the run, for config.yaml.

    Returns:
        The checkpoint to continue from, if there is one.
    """
    digest = plan.digest().hex()
    # rank 0 may be about to write it, so the others look at complete records only
    known = is_first or directory.record() is not None
    unfinished = known and directory.check(digest, plan.to_dict())
    check()
    checkpoint = directory.checkpoint if unfinished and directory.checkpoint.exists() else None
    if checkpoint is not None:
        check_fits(read_checkpoint(checkpoint))
    if is_first:
        directory.claim(digest, plan.to_dict(), config)
    return checkpoint
