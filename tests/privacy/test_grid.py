"""What is released lies on a public grid: no low-order bit tells which sum is beneath the noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from private_step import drawn_otherwise
from torch import Tensor

from lipdp_lightning.kernels.normals import release_ as release_sum_
from lipdp_lightning.mechanism.noise import Mode, Place, StepNoise, Sum
from lipdp_lightning.mechanism.reductions import release_
from lipdp_lightning.privacy.grid import FINENESS_BITS, grid_shift, grid_step

SECRET = bytes(range(16))
COUNT = 640


@pytest.mark.parametrize("deviation", [1e-12, 0.3, 0.5, 1.0, 1.7, 12345.6, 2.0**-40])
def test_a_step_is_a_power_of_two_near_a_thousandth_of_the_deviation(deviation: float) -> None:
    step = grid_step(deviation)
    assert math.frexp(step)[0] == 0.5
    assert 2**FINENESS_BITS <= deviation / step < 2 ** (FINENESS_BITS + 1)


@pytest.mark.parametrize("deviation", [1e-9, 0.7, 3.0, 2.0**20])
def test_shifting_rounds_to_the_nearest_multiple_and_of_two_to_the_even_one(deviation: float) -> None:
    step, shift = grid_step(deviation), grid_shift(deviation)
    generator = np.random.default_rng(0)
    steps = np.concatenate([generator.normal(size=500) * 2000, [0.0, 0.5, 1.5, -2.5, 2.0**50, 1 - 2.0**51]])
    for value in (steps * step).tolist():
        assert Fraction((value + shift) - shift) == round(Fraction(value) / Fraction(step)) * Fraction(step)
    huge = np.array([2.0**51.7, -(2.0**60), 2.0**100]) * step
    assert all(Fraction(v) % Fraction(step) == 0 for v in ((huge + shift) - shift).tolist())
    special = np.array([np.inf, -np.inf, np.nan])
    assert np.array_equal((special + shift) - shift, special, equal_nan=True)


def round_to_grid_(values: Tensor, deviation: float) -> Tensor:
    """Rounds values in place, by a release without noise."""
    release_sum_(values, bytes(32), 0.0, shift=grid_shift(deviation))
    return values


def test_values_are_rounded_to_the_grid_of_their_deviation() -> None:
    flat = torch.tensor([0.3001], dtype=torch.float64)
    found = [round_to_grid_(flat.clone(), deviation) for deviation in (1.0, 2.0**20, 0.0)]
    assert found == [round(0.3001 * 1024) / 1024, 0, flat]
    assert round_to_grid_(flat[:0].clone(), 5.0).shape == (0,)


# ---- the attack: which released values can come from a sum, and which from its neighbour's


def released(
    gradient: float, dtype: torch.dtype, deviation: float, world: int = 1, mode: Mode = "distributed", grid: bool = True
) -> Tensor:
    """One release of 640 coordinates, of several processes if asked for; the row's gradient is on the last one."""
    flats: list[Tensor] = []

    def of_rank(rank: int, reduce: Callable[[Tensor], None] | None) -> Tensor:
        values = torch.full((COUNT,), gradient if rank == world - 1 else 0.0, dtype=dtype)
        noise = StepNoise.of(SECRET, 0, Place(rank, world, mode), bytes(32), secure=True, grid=grid)
        release_([Sum(values, deviation)], noise, reduce, replicated=mode == "replicated")
        return values

    if world == 1:
        return of_rank(0, None)
    for rank in range(world):
        of_rank(rank, lambda total: flats.append(total.clone()))
    return of_rank(0, lambda total: total.copy_(torch.stack(flats).sum(0)))


def coarseness(value: float) -> int:
    """The largest e such that the value is a multiple of 2^e."""
    numerator, denominator = value.as_integer_ratio()
    return (numerator & -numerator).bit_length() - denominator.bit_length() if numerator else 10**6


def prove_absence(values: Tensor, present: float) -> int:
    """How many coordinates cannot be `present` + noise: such a sum is a multiple of the noise's last bit.

    A value within present / 2 of zero is the exact difference of `present` and noise of at least present / 2.
    """
    last_bit = math.frexp(present / 2)[1] - 53
    near = values.double()[values.double().abs() < present / 2].tolist()
    return sum(coarseness(value) < last_bit for value in near)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mode", ["distributed", "replicated"])
def test_no_coordinate_in_float64_proves_that_a_row_is_absent(world: int, mode: Mode) -> None:
    values = released(0.0, torch.float64, 1.1, world, mode)
    assert prove_absence(values, 1.0) == 0


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mode", ["distributed", "replicated"])
def test_without_the_grid_many_coordinates_prove_it(world: int, mode: Mode) -> None:
    """The same check on sums as they are: what an observer of float64 values could do."""
    assert prove_absence(released(0.0, torch.float64, 1.1, world, mode, grid=False), 1.0) > 16


def reachable(value: float, gradient: float, dtype: torch.dtype, deviation: float, rounded: bool) -> bool:
    """Whether some float64 noise next to where it would have to be is released as this value."""
    middle = (value - gradient) / deviation
    shift = grid_shift(deviation) if rounded else 0.0
    candidates = [middle]
    for direction in (-np.inf, np.inf):
        z = np.float64(middle)
        for _ in range(12):
            z = np.nextafter(z, direction)
            candidates.append(float(z))
    noise = torch.tensor(candidates, dtype=torch.float64)
    results = (((deviation * noise + gradient) + shift) - shift).to(dtype)
    return bool((results == torch.tensor(value, dtype=dtype)).any())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_one_sum_can_release_its_neighbour_can_release_too(dtype: torch.dtype) -> None:
    """Every value near zero, which is where sums of float32 and noise show their last bits, too."""
    for gradient, other in ((0.0, 1.0), (0.75, 0.0), (1 / 3, 0.0)):
        for value in released(gradient, dtype, 1.1).double().tolist():
            assert reachable(value, gradient, dtype, 1.1, True)
            assert reachable(value, other, dtype, 1.1, True)


def tiny_noise(count: int) -> Tensor:
    """Noise that happens to be next to zero, as it is now and then among millions of coordinates."""
    return torch.tensor([1.25 * 2.0**-k for k in range(54, 54 + count)], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_grid", [True, False])
def test_noise_next_to_zero_and_next_to_the_sum_are_released_alike(dtype: torch.dtype, with_grid: bool) -> None:
    """In float32, too, a value of 1.25 * 2^-54 can be noise alone, and cannot be noise beside a gradient of 1."""
    found = []
    for gradient in (0.0, 1.0):
        noise = tiny_noise(40) - gradient  # rounded as the noise itself would be: the nearest there is
        values = torch.full((40,), gradient, dtype=dtype)
        with drawn_otherwise(lambda _, number, start, count, own=noise: own[start : start + count].clone()):
            release_([Sum(values, 1.0)], StepNoise(bytes(32), grid=with_grid))
        found.append(set(values.double().tolist()))
    assert (found[0] == found[1]) is with_grid


# ---- what rounding before the grid may change


def test_the_sum_before_the_grid_is_within_its_stated_error() -> None:
    """Two roundings of float64: 2^-52 of |noise| + |sum|; even beside a sum of 2^20 deviations, the grid is coarser."""
    generator = np.random.default_rng(1)
    for scale in (1.0, 2.0**10, 2.0**20):
        deviation = 1.3
        noise, gradient = generator.normal(size=300), (scale * generator.normal(size=300)).astype(np.float32)
        for z, g in zip(noise.tolist(), gradient.astype(np.float64).tolist(), strict=True):
            exact = Fraction(deviation) * Fraction(z) + Fraction(g)
            error = abs(Fraction(deviation * z + g) - exact)
            assert error <= Fraction(2) ** -52 * (abs(Fraction(deviation * z)) + abs(Fraction(g)))
            assert error * 2**20 < Fraction(grid_step(deviation))


@pytest.mark.parametrize("world", [2, 3, 64])
def test_shares_of_ranks_add_up_exactly_and_stay_on_the_grid(world: int) -> None:
    """What each rank hands over is on the grid: the sum is the same in every order, and no message has a finer bit."""
    deviation = 0.9 / math.sqrt(world)
    shares = torch.randn(world, COUNT, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shares = torch.stack([round_to_grid_(s, deviation) for s in shares * 1e5])
    total, backwards = shares.sum(0), torch.zeros(COUNT, dtype=torch.float64)
    for share in shares.flip(0):
        backwards += share
    assert torch.equal(total, backwards)
    assert torch.equal(total, round_to_grid_(total.clone(), deviation))


def test_what_a_rank_hands_over_is_on_the_grid() -> None:
    seen: list[Tensor] = []
    noise = StepNoise.of(SECRET, 0, Place(1, 2), bytes(32), secure=True)
    release_([Sum(torch.full((COUNT,), 1 / 3), 1.1)], noise, lambda total: seen.append(total.clone()))
    steps = seen[0] / grid_step(1.1 / math.sqrt(2))
    assert torch.equal(steps, steps.round()) and steps.abs().max() > 100
