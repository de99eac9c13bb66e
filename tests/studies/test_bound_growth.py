"""Theorem 1 of paper 001: the growth of the certified bound, reached by a worst input, and where the theorem errs."""

from __future__ import annotations

import math

import pytest

from lipdp_lightning.studies.bound_growth import growth, printed


def power(constant: float, bias: float) -> float:
    """With which power of the depth the bound grows from 32 to 64 layers."""
    return math.log2(growth(constant, 64, bias, 1.0).bound / growth(constant, 32, bias, 1.0).bound)


def test_at_one_the_bound_grows_by_the_root_of_the_depth_or_its_power_of_three_halves() -> None:
    assert power(1.0, 0.0) == pytest.approx(0.5, abs=0.01)
    assert power(1.0, 1.0) == pytest.approx(1.5, abs=0.06)
    assert power(1.05, 0.0) > 2 and power(0.9, 0.0) < -3  # any other constant is exponential, the same check says


def test_above_one_it_explodes_and_below_one_it_does_not_depend_on_depth_any_more() -> None:
    assert growth(2.0, 17, 0.0, 1.0).bound / growth(2.0, 16, 0.0, 1.0).bound == pytest.approx(
        2 * math.sqrt(17 / 16), rel=1e-3
    )
    deep, deeper = (growth(0.5, depth, 1.0, 1.0).bound for depth in (20, 40))
    assert deeper == pytest.approx(deep, rel=1e-3) and deep > 1


@pytest.mark.parametrize("constant", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("depth", [1, 4, 16])
def test_a_worst_input_reaches_the_bound_without_biases_and_never_exceeds_it(constant: float, depth: int) -> None:
    found = growth(constant, depth, 0.0, 3.0)
    assert 0.999 < found.measured / found.bound <= 1 + 1e-5
    with_bias = growth(constant, depth, 1.0, 3.0)
    assert with_bias.measured <= with_bias.bound * (1 + 1e-5)


def test_input_norm_and_depth_multiply_where_the_theorem_adds_them() -> None:
    ratios = [
        growth(1.0, depth, 0.0, size).measured / printed(1.0, depth, 0.0, size)
        for depth, size in ((4, 2.0), (64, 64.0))
    ]
    assert ratios[0] < 1.1 and ratios[1] > 7
    roots = [growth(2.0, depth, 0.0, 1.0).measured / printed(2.0, depth, 0.0, 1.0) for depth in (4, 16)]
    assert roots[1] / roots[0] == pytest.approx(2.0, rel=1e-3)
