"""Certified norms of many layers, kept valid between exact evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .changes import change_from
from .deviations import distances
from .references import Reference, reference_of

ExactNorm = Callable[[Tensor], float]

SLACK = 0.1
"""The bound of a layer that follows its noise is then about 6 % above the last exact one on average. Half of it
costs two to five times as much work per step, double saves a quarter."""

_FAR_SHARE = 0.4
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class NormEntry:
    """A weight, the function that certifies its norm from its values, and kappa (1 for a dense layer).

    ``exact_norm`` must return an upper bound on the norm of the operator whose weight it is given;
    ``weight`` is referred to, not copied, and may change in place, in device or in dtype.

    With ``groups`` given, a change D of the weight moves the norm by at most kappa times the largest spectral
    norm among the matrices ``D.reshape(groups, rows / groups, -1)``, as it does for linear layers and
    convolutions, and not only by kappa ||D||_F, which is larger.
    """

    weight: Tensor
    exact_norm: ExactNorm
    kappa: float = 1.0
    name: str = "weight"
    groups: int | None = None
    anew: ExactNorm | None = None


@dataclass(frozen=True)
class _Anchor:
    """A matrix, and an upper bound on the norm of its operator before it was ``scale`` times what it was."""

    matrix: Reference
    norm: float
    scale: float = 1.0

    @property
    def bound(self) -> float:
        return self.scale * self.norm * (1.0 + 2.0**-50)

    def scaled(self, factor: float) -> _Anchor:
        return replace(self, matrix=self.matrix.scaled(factor), scale=self.scale * factor)


_SavedMatrix = tuple[Tensor, float, float, torch.dtype | None]
_Saved = tuple[_SavedMatrix, float, float]


def _saved(matrix: Reference, anchor: _Anchor) -> _Saved:
    return (matrix.values, matrix.frobenius, matrix.factor, matrix.of), anchor.norm, anchor.scale


def _loaded(saved: _SavedMatrix, device: torch.device) -> Reference:
    values, frobenius, factor, of = saved
    return Reference(values.to(device), frobenius, factor, of)


def _same(values: Tensor, weight: Tensor) -> bool:
    return values.device == weight.device and values.dtype == weight.dtype and torch.equal(values, weight)


def _subnormal_error(weight: Tensor) -> float:
    """Largest Frobenius norm of what underflow can take from a scaled weight."""
    information = torch.finfo(weight.dtype)
    return information.smallest_normal * information.eps * math.sqrt(weight.numel())


class NormTracker:
    """Upper bounds on the norms of a list of weights, exact only when they have to be.

    The norm of each weight W is bounded in the cheapest of three ways that stays within (1 + slack) of the last
    exact bound, that of W0:

    * s(W1) + kappa ||W - W1||_F, at every :meth:`update`, for all layers at once (without kappa this is false
      for a convolution: its operator norm moves by up to kappa ||W - W1||_F); for large entries with ``groups``, the
      spectral norms of strips of W - W1 take the place of its Frobenius norm;
    * s(W0) + kappa s(W - W0 as a matrix) by a few matrix products, for entries with ``groups``. For changes
      that resemble noise this is some ten times closer. W then becomes W1;
    * exactly; W becomes W0 and W1. Entries whose norm is taken ``anew`` have no second way.

    A radial scaling is remembered as a number and not carried out on W0 and W1, so that it neither costs
    nor rounds anything. After :meth:`refresh` of all entries nothing is left of earlier steps.

    Memory: a copy of the weights, as two in half precision: W0 rounded, and W1 as what is to be added to it; of entries
    whose norm is taken ``anew``, half of that. The norm of a weight and of what is kept in its place differ by no more
    than that of the difference, which is added.
    """

    def __init__(
        self,
        entries: Sequence[NormEntry],
        slack: float = SLACK,
        known: Sequence[tuple[Tensor, float]] | None = None,
    ) -> None:
        """``known`` may hold values that each weight had and the certified norm of those: taken over, and not
        evaluated again, where the weight still has them."""
        if not (math.isfinite(slack) and slack >= 0.0):
            raise ValueError(f"slack={slack} must be finite and not negative.\nHINT: 0.05 allows bounds 5 % high.")
        for entry in entries:
            if not entry.weight.is_floating_point() or not (math.isfinite(entry.kappa) and entry.kappa >= 0.0):
                raise ValueError(
                    f"{entry.name}: dtype {entry.weight.dtype} and kappa={entry.kappa} bound no norm.\n"
                    "HINT: give a real floating-point weight and the kappa of bounds.norms.kappa."
                )
        self.entries = tuple(entries)
        self.slack = slack
        self.refresh_counts = [0] * len(self.entries)
        self.tightenings = 0
        self._far: dict[int, _Anchor] = {}
        self._near: dict[int, _Anchor] = {}
        for index, entry in enumerate(self.entries):
            values, norm = known[index] if known is not None else (None, math.inf)
            if values is not None and _same(values, entry.weight.detach()):
                self._anchor(index, norm, one=entry.anew is not None)
            else:
                self.refresh(index)

    @torch.no_grad()
    def refresh(self, index: int) -> float:
        """Certify one weight from its present values and forget its past."""
        entry = self.entries[index]
        weight = entry.weight.detach()
        matrix = None if entry.anew is None else reference_of(weight)
        norm = float(entry.exact_norm(weight) if entry.anew is None or matrix is None else entry.anew(matrix.dense()))
        if not (math.isfinite(norm) and norm >= 0.0):
            raise ValueError(
                f"{entry.name}: its certified norm is {norm}, so no sensitivity follows from it.\n"
                "HINT: lower the learning rate, or restore the last finite checkpoint."
            )
        self.refresh_counts[index] += 1
        if matrix is None:
            self._anchor(index, norm)
            return norm
        self._far[index] = self._near[index] = _Anchor(matrix, norm)
        return self._away(entry, matrix, norm)

    @property
    def refreshes(self) -> int:
        """How many exact norms were evaluated."""
        return sum(self.refresh_counts)

    def _anchor(self, index: int, norm: float, one: bool = False) -> None:
        """``norm`` bounds that of the weight as it is now. With ``one`` reference, bounds pay its rounding twice."""
        entry, weight = self.entries[index], self.entries[index].weight.detach()
        matrix = reference_of(weight)
        if one:
            self._far[index] = self._near[index] = _Anchor(matrix, self._away(entry, matrix, norm))
            return
        distance = distances([weight], [matrix])[0]
        if distance == 0.0:
            self._far[index] = self._near[index] = _Anchor(matrix, norm)
            return
        near, spectral = change_from(weight, matrix, entry.groups)
        change = min(distance, spectral)
        self._far[index] = _Anchor(matrix, math.nextafter(norm + entry.kappa * change, math.inf))
        self._near[index] = _Anchor(near, self._away(entry, near, norm))

    @staticmethod
    def _away(entry: NormEntry, matrix: Reference, norm: float) -> float:
        """What bounds the norm of the weight if ``norm`` bounds that of a matrix near it, and the other way round."""
        distance = distances([entry.weight.detach()], [matrix], [entry.groups is not None])[0]
        return norm if distance == 0.0 else math.nextafter(norm + entry.kappa * distance, math.inf)

    @torch.no_grad()
    def _bounds_and_deviations(self) -> tuple[list[float], list[float]]:
        anchors = [self._near[index] for index in range(len(self.entries))]
        weights = [entry.weight.detach() for entry in self.entries]
        as_matrices = [entry.groups is not None for entry in self.entries]
        deviations = distances(weights, [anchor.matrix for anchor in anchors], as_matrices)
        bounds: list[float] = []
        for index, (anchor, deviation) in enumerate(zip(anchors, deviations, strict=True)):
            kappa, far = self.entries[index].kappa, self._far[index]
            unmoved = deviation == 0.0 and anchor.scale == 1.0
            bound = anchor.norm if unmoved else math.nextafter(anchor.bound + kappa * deviation, math.inf)
            # so written that NaN comes to a refresh, and is refused there
            if not bound <= (1.0 + self.slack) * far.scale * far.norm:
                tighter = self._tighten(index) or self.refresh(index)
                bound = min(bound, tighter) if math.isfinite(bound) else tighter
                deviations[index] = 0.0
            bounds.append(bound)
        return bounds, deviations

    def _tighten(self, index: int) -> float | None:
        """The bound by the spectral norm of the whole change, if it leaves enough of the slack for the next steps.

        How much is enough differs between layers, so that they do not all ask for an exact norm at once.
        """
        entry, far = self.entries[index], self._far[index]
        weight = entry.weight.detach()
        if entry.anew is not None or entry.groups is None or self.slack == 0.0 or not far.matrix.fits(weight):
            return None
        detail = self._near.pop(index).matrix.detail  # its memory is free for what takes its place
        near, change = change_from(weight, far.matrix, entry.groups, None if detail is None else detail.values)
        norm = math.nextafter(far.bound + entry.kappa * change, math.inf)
        share = _FAR_SHARE * (0.75 + 0.5 * ((index + 1) * _GOLDEN % 1.0))
        if not norm <= (1.0 + share * self.slack) * far.scale * far.norm:
            return None
        self._near[index] = _Anchor(near, self._away(entry, near, norm))
        self.tightenings += 1
        return norm

    def state(self) -> list[tuple[_Saved, _Saved | None]]:
        """All that later bounds depend on, besides the weights. Refers to tensors that may change in place."""
        return [
            (_saved(far.matrix, far), None if (near := self._near[index]).matrix.detail is None else
             _saved(near.matrix.detail, near))
            for index, far in self._far.items()
        ]  # fmt: skip

    def load_state(self, state: Sequence[tuple[_Saved, _Saved | None]]) -> None:
        """Go on as the tracker did that gave ``state``; its values are taken over and may change in place.

        A state of weights on another device is moved; one of other shapes or dtypes leads to exact norms.
        """
        assert len(state) == len(self.entries), "the state belongs to other weights"
        for index, (far, near) in enumerate(state):
            device = self.entries[index].weight.device
            matrix = _loaded(far[0], device)
            self._far[index] = self._near[index] = _Anchor(matrix, *far[1:])
            if near is not None:
                self._near[index] = _Anchor(replace(matrix, detail=_loaded(near[0], device)), *near[1:])

    def update(self) -> list[float]:
        """Upper bounds on the norms of all weights as they are now."""
        return self._bounds_and_deviations()[0]

    def certified(self, index: int, norm: float) -> None:
        """Tell the tracker that ``norm`` bounds the norm of a weight as it is now, as :meth:`refresh` would find."""
        assert math.isfinite(norm) and norm >= 0.0
        self._anchor(index, norm)

    def rescale(self, index: int, factor: float) -> None:
        """Tell the tracker that the weight was multiplied in place by ``factor`` >= 0 (a radial projection).

        How far rounding took the weight from the exact multiple is measured by the next :meth:`update`.
        """
        if not (math.isfinite(factor) and factor >= 0.0):
            raise ValueError(f"factor={factor} is no radial scaling.\nHINT: it must be finite and not negative.")
        alike = self._far[index] is self._near[index]
        self._far[index] = self._far[index].scaled(factor)
        self._near[index] = self._far[index] if alike else self._near[index].scaled(factor)

    @torch.no_grad()
    def clip(self, max_norms: Sequence[float | None]) -> list[float]:
        """Scale down, in place, every weight whose bound exceeds its maximum; return the bounds afterwards.

        None leaves a weight free. Each returned bound is at most its maximum: the factor allows for the
        rounding of the scaled weight. Exact norms are evaluated only as often as :meth:`update` does, so a
        weight may end up to ``slack`` below its maximum. A later :meth:`update` may report a few units in the
        last place above the maximum: its bound pays for the rounding of the difference too.
        """
        if len(max_norms) != len(self.entries) or any(m is not None and not m > 0.0 for m in max_norms):
            raise ValueError(
                f"max_norms={list(max_norms)} for {len(self.entries)} weights.\n"
                "HINT: one positive maximum per weight, None for a free one."
            )
        bounds, deviations = self._bounds_and_deviations()
        for index, (bound, maximum) in enumerate(zip(bounds, max_norms, strict=True)):
            if maximum is None or bound <= maximum:
                continue
            entry, near = self.entries[index], self._near[index].matrix
            frobenius = near.norm + 3.0 * deviations[index]  # ||W||_F <= ||W1||_F + ||W - W1||_F, and sqrt(8) < 3
            rounding = torch.finfo(entry.weight.dtype).eps * frobenius
            reachable = max(0.0, maximum - entry.kappa * _subnormal_error(entry.weight))
            factor = reachable / (bound + entry.kappa * rounding) * (1.0 - 2.0**-50)
            entry.weight.mul_(factor)
            self.rescale(index, factor)
            bounds[index] = maximum
        return bounds
