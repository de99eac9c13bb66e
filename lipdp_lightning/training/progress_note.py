"""Notes how far a run is, how fast, and what it has spent, for `lipdp status`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from .private_steps import PrivateSteps
from .run_directory import RunDirectory

SIGN_OF_LIFE = 10.0  # seconds between two notes of the progress


class Pace:
    """The rate of the steps since a run was started or continued.

    Args:
        step: The number of the first step.
    """

    def __init__(self, step: int) -> None:
        self._first, self._began = step, time.monotonic()

    def rate(self, step: int) -> float | None:
        """Returns the steps per second until the step of that number begins; None before the first one is done."""
        seconds, steps = time.monotonic() - self._began, step - self._first
        return steps / seconds if steps > 0 and seconds > 0 else None


class ProgressNote:
    """Writes progress.json every few seconds, and whenever epsilon changes.

    Args:
        directory: The run directory.
        steps: What takes the steps: the Strategy or an Engine.
        step: The number of the first step that this process takes.
    """

    def __init__(self, directory: RunDirectory, steps: PrivateSteps, step: int) -> None:
        self._directory, self._steps, self._pace = directory, steps, Pace(step)
        self._noted: tuple[float, float | None] = (-math.inf, None)

    def before_step(
        self, step: int, metrics: Callable[[], Mapping[str, float]] = dict, beside: Callable[[], float] = float
    ) -> None:
        """Notes the epsilon before the step that spends it, so that the note is an upper bound at any moment.

        Args:
            step: The number of the step.
            metrics: Returns the metrics of held-out rows so far.
            beside: Returns the epsilon that is spent beside the steps.
        """
        epsilon, guarantee, plan = None, None, self._steps.plan
        assert plan is not None
        if plan.certified:
            spending, more = self._steps.spending, beside()
            guarantee = spending.guarantee().epsilon + more
            epsilon = spending.shown(self._steps.branches.spent(step + 1)) + more
        now = time.monotonic()
        if epsilon == self._noted[1] and now - self._noted[0] < SIGN_OF_LIFE:
            return
        self._noted = (now, epsilon)
        known: dict[str, Any] = {k: v for k, v in metrics().items() if math.isfinite(v)}
        self._directory.note_progress(
            {"epsilon_taken": epsilon, "epsilon": guarantee, "rate": self._pace.rate(step), "metrics": known}
        )
