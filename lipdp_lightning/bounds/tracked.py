"""A norm source for training: exact norms at times, cheap certified updates in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .deviations import vector_norms
from .references import loops, strips
from .tracker import SLACK, NormEntry, NormTracker
from .values import NormSource


class TrackedNorms(NormSource):
    """Serves a Certifier whose weights change in place from step to step.

    The first walk evaluates every norm exactly and remembers the order of the requests; later walks answer
    from one :class:`NormTracker` update, with one host synchronisation for all layers. ``slack`` is how far
    a cheap bound may lie above the last exact one before the exact one is taken again.

    Bounds of a projection serve the walk that follows it too, where the weights are the same: the caller names the
    weights by a digest of all of their bits, in :meth:`projected` and in :meth:`expect`.
    """

    def __init__(self, slack: float = SLACK) -> None:
        loops(), strips()  # are compiled here and not in the second walk, which is that of the first step
        self._slack = slack
        self._entries: list[NormEntry] = []
        self._groups: list[int] = []
        self._known: list[tuple[Tensor, float]] = []
        self._vectors: list[Tensor] = []
        self.tracker: NormTracker | None = None
        self._operator_bounds: list[float] = []
        self._vector_bounds: list[float] = []
        self._next_operator = self._next_vector = 0
        self._walks = 0
        self._projected: tuple[bytes, list[float]] | None = None
        self._expected = b""

    def state(self) -> dict[str, Any] | None:
        """What a resume needs to go on with the same bounds; see :meth:`NormTracker.state`."""
        return None if self.tracker is None else {"tracker": self.tracker.state(), "projected": self._projected}

    def load_state(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            assert self.tracker is not None, "the tracker starts with the second walk"
            self.tracker.load_state(state["tracker"])
            self._projected = state["projected"]

    def projected(self, digest: bytes, bounds: list[float]) -> None:
        """A projection left these bounds on all norms, of the weights that the digest names."""
        self._projected = digest, bounds

    def expect(self, digest: bytes) -> None:
        """The next walk is over the weights that the digest names."""
        self._expected = digest

    def begin(self) -> None:
        self._walks += 1
        expected, self._expected = self._expected, b""
        self._next_operator = self._next_vector = 0
        if self._walks == 1:
            return
        if self.tracker is None:
            self.tracker = NormTracker(self._entries, slack=self._slack, known=self._known)
            self._known = []
        known = self._projected
        self._operator_bounds = known[1] if known is not None and known[0] == expected else self.tracker.update()
        self._vector_bounds = vector_norms(self._vectors)

    def operator_norm(
        self,
        weight: Tensor,
        exact: Callable[[], float],
        deviation_factor: float,
        groups: int = 1,
        spectral: bool = False,
        anew: Callable[[Tensor], float] | None = None,
    ) -> float:
        if self._walks == 1:
            bound = exact()
            in_matrices = groups if spectral else None
            self._entries.append(NormEntry(weight, lambda _: exact(), deviation_factor, groups=in_matrices, anew=anew))
            self._groups.append(groups)
            self._known.append((weight.detach().clone(), bound))
            return bound
        bound = self._operator_bounds[self._next_operator]
        self._next_operator += 1
        return bound

    def vector_norm(self, vector: Tensor) -> float:
        if self._walks == 1:
            self._vectors.append(vector)
            return super().vector_norm(vector)
        bound = self._vector_bounds[self._next_vector]
        self._next_vector += 1
        return bound

    def entries_of(self, weight: Tensor) -> list[int]:
        """Which tracker entries read this weight."""
        return [i for i, entry in enumerate(self._entries) if entry.weight is weight]

    def weight_groups(self, index: int) -> int:
        """In how many groups an entry's convolution works."""
        return self._groups[index]
