"""References in half precision: exact as matrices, and the bounds that rest on them hold for the weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lipdp_lightning.bounds import changes, deviations
from lipdp_lightning.bounds.close_norm import close_norm
from lipdp_lightning.bounds.deviations import distances
from lipdp_lightning.bounds.norms import dense_norm
from lipdp_lightning.bounds.references import Reference, closer, difference, reference_of
from lipdp_lightning.bounds.tracker import NormEntry, NormTracker

SIDE = 128  # of a matrix that is large enough to be rounded


def matrix_of(reference: Reference) -> Tensor:
    own = reference.factor * reference.values.double()
    return own if reference.detail is None else own + matrix_of(reference.detail)


def truth(weight: Tensor) -> float:
    return float(torch.linalg.matrix_norm(weight.double(), 2))


def random_weight(seed: int = 0, size: float = 1.0, columns: int = SIDE) -> Tensor:
    return size * torch.randn(SIDE, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1e-9, 1e-3, 1.0, 1e6])
def test_distances_are_those_from_the_rounded_matrix(size: float) -> None:
    weight = random_weight(size=size)
    coarse = reference_of(weight)
    fine = closer(coarse, difference(weight, coarse))
    assert coarse.values.dtype == torch.float16 and coarse.values.numel() == weight.numel()
    moved = weight + 1e-3 * random_weight(1, size)
    for reference, nearness in ((coarse, 2e-3), (fine, 2e-6)):
        for now in (weight, moved):
            exact = float(torch.linalg.matrix_norm(now.double() - matrix_of(reference)))
            assert exact <= distances([now], [reference])[0] <= exact * 1.001 + 1e-6 * exact + 1e-6 * size * SIDE
        assert distances([weight], [reference])[0] <= nearness * size * SIDE
        assert float(torch.linalg.matrix_norm(matrix_of(reference))) <= reference.norm


def test_small_weights_and_other_dtypes_are_kept_as_they_are() -> None:
    for weight in (torch.randn(10, 10), random_weight().double(), random_weight().bfloat16()):
        reference = reference_of(weight)
        assert reference.values.dtype == weight.dtype and torch.equal(reference.values, weight)
        assert distances([weight], [reference]) == [0.0]


def test_what_exceeds_half_precision_is_kept_as_it_is() -> None:
    weight = random_weight(size=1e20)
    assert torch.equal(reference_of(weight).values, weight)
    tiny = random_weight(size=1e-20)
    assert float(torch.linalg.matrix_norm(tiny.double())) < distances([tiny], [reference_of(tiny)])[0] * 1.001


class ForgetsTheRounding(NormTracker):
    """The norm of a weight is taken for that of the matrix that is kept in its place."""

    def _anchor(self, index: int, norm: float, one: bool = False) -> None:
        super()._anchor(index, norm, one)
        self._far[index] = replace(self._far[index], norm=norm)


@pytest.mark.parametrize(("kind", "sound"), [(NormTracker, True), (ForgetsTheRounding, False)])
def test_the_rounding_of_what_is_kept_is_part_of_the_bound(
    kind: type[NormTracker], sound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix whose entries are all rounded up, moved along itself and, which asks for the second bound, across."""
    weight = torch.full((SIDE, SIDE), 1 + 0.75 * 2.0**-10)
    followed = kind([NormEntry(weight, dense_norm, groups=1)], slack=0.05)
    monkeypatch.setattr(deviations, "_by_strips", deviations._in_one_pass)  # which asks earlier
    monkeypatch.setattr(changes, "norm_of_strips", lambda strips: math.hypot(*map(truth, strips)))
    noise = 0.05 * random_weight()
    weight.add_(0.01 + noise - noise.mean(0) - noise.mean(1, keepdim=True) + noise.mean())
    bound = followed.update()[0]
    assert followed.tightenings == 1 and followed.refreshes == 1
    assert (bound >= truth(weight) * (1 - 1e-9)) is sound


WIDE, WIDE_NORM = 1024, 40.0


def walked(followed: NormTracker, weight: Tensor, steps: int, seed: int) -> list[float]:
    """Bounds over the steps of a walk that is projected; none below the truth, and not far above."""
    found = []
    for step in range(steps):
        weight.add_(0.012 * random_weight(100 * seed + step, columns=weight.shape[1]))
        bound = followed.clip([WIDE_NORM])[0]
        assert truth(weight) <= bound <= WIDE_NORM
        found.append(followed.update()[0])
        assert truth(weight) <= found[-1] <= truth(weight) * 1.12
    return found


def test_bounds_hold_along_a_walk_and_a_state_goes_on_with_the_same_ones() -> None:
    weight = random_weight(columns=WIDE)
    followed = NormTracker([NormEntry(weight, dense_norm, groups=1)])
    walked(followed, weight, 60, seed=1)
    assert followed.tightenings > 3 and followed.refreshes < 20
    state, copy = followed.state(), weight.clone()
    held = [matrix[0] for part in state[0] if part is not None for matrix in part[:1]]
    assert [values.dtype for values in held] == [torch.float16] * 2
    again = NormTracker([NormEntry(copy, dense_norm, groups=1)])
    again.load_state(
        [tuple(part if part is None else ((part[0][0].clone(), *part[0][1:]), *part[1:]) for part in state[0])]
    )
    assert walked(again, copy, 20, seed=7) == walked(followed, weight, 20, seed=7)


class ForgetsTheDistance(NormTracker):
    """The norm of what is kept in a weight's place is taken for that of the weight."""

    @staticmethod
    def _away(entry: NormEntry, matrix: Reference, norm: float) -> float:
        return norm


@pytest.mark.parametrize(("kind", "sound"), [(NormTracker, True), (ForgetsTheDistance, False)])
def test_the_norm_of_a_reference_is_no_bound_on_that_of_the_weight(kind: type[NormTracker], sound: bool) -> None:
    """A matrix whose entries are all rounded down, both when it is followed first and when its norm is taken anew."""
    weight = torch.full((SIDE, SIDE), 1.0)
    followed = kind([NormEntry(weight, dense_norm, anew=dense_norm)], slack=0.05)
    weight.fill_(2 + 0.25 * 2.0**-9)
    bound = followed.update()[0]
    assert followed.refreshes == 2
    assert (bound >= truth(weight) * (1 - 1e-9)) is sound
    followed.certified(0, truth(weight))
    assert followed.update()[0] >= truth(weight) * (1 - 1e-9)


class AsksForTheWeight(NormTracker):
    """The norm of the weight is taken for that of what is kept in its place."""

    def _anchor(self, index: int, norm: float, one: bool = False) -> None:
        super()._anchor(index, norm, one)
        self._far[index] = self._near[index] = replace(self._far[index], norm=norm)


@pytest.mark.parametrize(("kind", "sound"), [(NormTracker, True), (AsksForTheWeight, False)])
def test_the_norm_of_a_weight_is_no_bound_on_that_of_its_reference(kind: type[NormTracker], sound: bool) -> None:
    """A matrix whose entries are all rounded up, then moved along itself."""
    weight = torch.full((SIDE, SIDE), 1 + 0.75 * 2.0**-10)
    known = [(weight.clone(), truth(weight) * (1 + 1e-12))]
    followed = kind([NormEntry(weight, dense_norm, anew=dense_norm)], slack=0.05, known=known)
    assert followed.refreshes == 0
    weight.add_(0.01)
    assert (followed.update()[0] >= truth(weight) * (1 - 1e-9)) is sound


def test_bounds_taken_anew_hold_along_a_walk_and_keep_one_reference() -> None:
    weight = random_weight(columns=WIDE)
    followed = NormTracker([NormEntry(weight, dense_norm, groups=1, anew=close_norm)])
    walked(followed, weight, 60, seed=1)
    assert followed.tightenings == 0 and 3 < followed.refreshes < 40
    state, copy = followed.state(), weight.clone()
    ((values, *numbers), *of_anchor), near = state[0]
    assert near is None and values.dtype == torch.float16
    again = NormTracker([NormEntry(copy, dense_norm, groups=1, anew=close_norm)])
    again.load_state([(((values.clone(), *numbers), *of_anchor), None)])  # type: ignore[list-item]
    assert walked(again, copy, 20, seed=7) == walked(followed, weight, 20, seed=7)
