"""When the certified norms are made exact, so that a replayed step has the noise scales it had."""

from __future__ import annotations

from ..bounds.tracked import TrackedNorms
from .step_record import Replay, StepRecord


class Settling:
    """Certifies all norms anew at checkpoints; what follows is then a function of the weights in the file.

    Bounds kept from earlier steps may lie a little higher than those a resumed run starts from. The noise of a
    replayed step would be the same draw at another scale, and the difference of two such releases tells
    the noise. A session that repeats steps settles at the steps at which the first one did, and no others.
    """

    def __init__(self, norms: TrackedNorms, record: StepRecord, branch: str, replay: Replay, writes: bool) -> None:
        self._norms, self._record, self._branch, self._writes = norms, record, branch, writes
        self._replay = replay

    def replaying(self, step: int) -> bool:
        """Whether an earlier session may have released this step."""
        return step < self._replay.end

    def at_checkpoint(self, step: int) -> None:
        if not self.replaying(step):
            self.settle()
            if self._writes:
                self._record.settle(self._branch, step)

    def at_step(self, step: int) -> None:
        if self.replaying(step) and step in self._replay.settled:
            self.settle()

    def settle(self) -> None:
        tracker = self._norms.tracker
        for index in range(len(tracker.entries) if tracker is not None else 0):
            tracker.refresh(index)  # type: ignore[union-attr]
