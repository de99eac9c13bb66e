"""How far a weight went from its reference: the bound holds, and the nearer reference is near."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lipdp_lightning.bounds import changes
from lipdp_lightning.bounds.changes import change_from
from lipdp_lightning.bounds.deviations import distances
from lipdp_lightning.bounds.references import Reference, is_packed, reference_of


def matrix_of(reference: Reference) -> Tensor:
    own = reference.factor * reference.values.double()
    return own if reference.detail is None else own + matrix_of(reference.detail)


def start(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def moves(shape: torch.Size) -> list[Tensor]:
    """Noise; one entry; one direction, along which strips do not add up to more; nothing."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(1)
    one = torch.zeros(shape)
    one[rows // 2, columns // 3] = 1e-3
    return [1e-3 * torch.randn(shape, generator=generator), one, torch.full(shape, 1e-3), torch.zeros(shape)]


@pytest.mark.parametrize("shape", [(300, 400), (128, 128), (129, 700), (400, 300)])
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e6])
def test_the_bound_holds_and_the_detail_is_near(shape: tuple[int, int], size: float) -> None:
    weight = size * start(*shape)
    coarse = reference_of(weight).scaled(0.9)
    for move in moves(weight.shape):
        moved = weight * 0.9 + size * move
        left = moved.double() - matrix_of(coarse)
        near, bound = change_from(moved, coarse, groups=1)
        assert is_packed(moved, near) and near.values is coarse.values
        truth = float(torch.linalg.matrix_norm(left, 2))
        strips = math.ceil(min(shape) / 128)
        assert truth <= bound <= truth * math.sqrt(strips) * 1.7 + 1e-6 * size * min(shape)
        assert float(torch.linalg.matrix_norm(moved.double() - matrix_of(near))) <= distances([moved], [near])[0]
        assert distances([moved], [near])[0] <= 1e-3 * float(torch.linalg.matrix_norm(left)) + 1e-7 * size * max(shape)
        assert float(torch.linalg.matrix_norm(matrix_of(near))) <= near.norm
        assert near.detail is not None
        assert float(torch.linalg.vector_norm(near.detail.values.double())) <= near.detail.frobenius


def test_a_bound_that_forgets_strips_fails_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest of the strips' norms is below that of what they make up together."""
    weight = start(300, 400)
    coarse, moved = reference_of(weight), weight + 1e-3
    assert change_from(moved, coarse, groups=1)[1] >= 1e-3 * math.sqrt(300 * 400)
    whole = changes.norm_of_strips
    monkeypatch.setattr(changes, "norm_of_strips", lambda strips: max(whole([strip]) for strip in strips))
    assert change_from(moved, coarse, groups=1)[1] < 0.9e-3 * math.sqrt(300 * 400)


def test_memory_of_an_earlier_detail_is_used_again() -> None:
    weight = start(300, 400)
    coarse = reference_of(weight)
    first = change_from(weight + 1e-3, coarse, groups=1)[0].detail
    assert first is not None
    room = first.values
    second = change_from(weight - 2e-3, coarse, groups=1, room=room)
    assert second[0].detail is not None and second[0].detail.values is room
    fresh = change_from(weight - 2e-3, coarse, groups=1, room=torch.empty(3, 3).half())
    assert fresh[0].detail is not None and torch.equal(fresh[0].detail.values, room) and fresh[1] == second[1]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38])
def test_what_cannot_be_bounded_is_not(value: float) -> None:
    weight = start(300, 400)
    coarse = reference_of(weight)
    weight[200, 17] = value
    assert not change_from(weight, coarse, groups=1)[1] < value


def test_without_groups_no_spectral_norm_bounds_the_change() -> None:
    weight = start(300, 400)
    near, bound = change_from(weight, reference_of(weight), groups=None)
    assert bound == math.inf and distances([weight], [near])[0] < 1e-4
