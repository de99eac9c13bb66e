"""The tree problems as networks between gaps, against dense algebra, linear programs and optimality conditions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from lipdp_lightning.curves import gaps, gaps_l1
from lipdp_lightning.curves.gaps import GapNetwork, least_squares_increments
from lipdp_lightning.curves.gaps_l1 import best_potentials, least_absolute_increments
from lipdp_lightning.curves.smooth import tree_l1_program
from lipdp_lightning.curves.tree import noise_matrix

TREES = [(2,), (2, 2, 2), (2,) * 5, (3, 3), (2, 4, 3), (5,), (4, 2, 2)]


def incidence(points: int, fan_outs: tuple[int, ...]) -> np.ndarray:
    """B, gaps x nodes: what each node's noise adds to the increments."""
    paths = noise_matrix(fan_outs)[:points]
    return np.diff(paths, axis=0, prepend=0.0, append=0.0)


def sizes(fan_outs: tuple[int, ...]) -> list[int]:
    leaves = int(np.prod(fan_outs))
    return sorted({leaves, leaves - 1, max(1, leaves - 3), leaves // 2, leaves // 2 + 1} - {0})


@pytest.mark.parametrize("fan_outs", TREES)
def test_the_network_is_that_of_the_tree_and_is_solved(fan_outs: tuple[int, ...]) -> None:
    generator = np.random.default_rng(0)
    for points in sizes(fan_outs):
        network, edges = GapNetwork(points, fan_outs), incidence(points, fan_outs)
        laplacian = edges @ edges.T
        z = generator.normal(size=points + 1)
        assert network.laplacian(z) == pytest.approx(laplacian @ z)
        for share in (0.0, 0.3, 0.7, 1.0):
            free = generator.random(points + 1) < share
            free[generator.integers(points + 1)] = False
            current = generator.normal(size=points + 1)
            expected = np.zeros(points + 1)
            expected[free] = np.linalg.solve(laplacian[np.ix_(free, free)], current[free])
            assert network.solve(current, free) == pytest.approx(expected, abs=1e-9)


def least_squares_gap(d: np.ndarray, w: np.ndarray, edges: np.ndarray, end_free: bool) -> float:
    """How far w is from the conditions of optimality: w = d + B B'z with z >= 0, w >= 0, z'w = 0."""
    kept = slice(None) if end_free else slice(-1)
    edges, d, w = edges[kept], d[kept], w[kept]
    z = np.linalg.lstsq(edges @ edges.T, w - d, rcond=None)[0]
    if end_free:  # the constant potential changes nothing
        z = z - z.min()
    return max(
        float(-w.min()), float(-z.min()), float(np.max(w * z)), float(np.max(np.abs(edges @ edges.T @ z + d - w)))
    )


@pytest.mark.parametrize("end_free", [True, False])
@pytest.mark.parametrize("fan_outs", TREES)
def test_least_squares_meets_the_conditions_of_optimality(fan_outs: tuple[int, ...], end_free: bool) -> None:
    generator = np.random.default_rng(1)
    for points in sizes(fan_outs):
        edges = incidence(points, fan_outs)
        for spread in (1, 4, 20):
            values = np.cumsum(generator.poisson(1, points)) + generator.normal(0, spread, points)
            d = np.diff(values, prepend=0.0, append=12.0 if end_free else values[-1])
            w = least_squares_increments(d, fan_outs, end_free)
            assert least_squares_gap(d, w, edges, end_free) < 1e-8


def test_a_network_without_the_roots_edge_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(2)
    values = np.cumsum(generator.poisson(1, 7)) + generator.normal(0, 8, 7)
    d = np.diff(values, prepend=0.0, append=values[-1])
    edges = incidence(7, (2, 2, 2))
    whole = gaps._two_gaps
    monkeypatch.setattr(gaps, "_two_gaps", lambda c, *rest: whole(c - 1, *rest))
    with pytest.raises(AssertionError):
        assert least_squares_gap(d, least_squares_increments(d, (2, 2, 2), False), edges, False) < 1e-8


def cost(d: np.ndarray, w: np.ndarray | None, edges: np.ndarray, end_free: bool) -> float:
    """min sum |nu| of the noises that lead from d to w, or to any w >= 0."""
    rows, kept = np.hstack([edges, -edges]), slice(None) if end_free else slice(-1)
    if w is None:
        return float(linprog(np.ones(rows.shape[1]), A_ub=-rows[kept], b_ub=d[kept], bounds=(0, None)).fun)
    # all increments but the last, which is what is left
    return float(linprog(np.ones(rows.shape[1]), A_eq=rows[:-1], b_eq=(w - d)[:-1], bounds=(0, None)).fun)


@given(levels=st.integers(1, 4), end_free=st.booleans(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_least_absolute_noises_are_least(levels: int, end_free: bool, data: st.DataObject) -> None:
    points = data.draw(st.integers(1 << (levels - 1), 1 << levels))
    values = np.array(data.draw(st.lists(st.integers(-12, 24), min_size=points, max_size=points)), dtype=float)
    if data.draw(st.booleans()):
        values = values * 0.37
    upper = float(data.draw(st.integers(0, 15)))
    d = np.diff(values, prepend=0.0, append=upper if end_free else values[-1])
    edges = incidence(points, (2,) * levels)
    w = least_absolute_increments(d, levels, end_free)
    assert w.min() >= 0 and (not end_free or float(w.sum()) == pytest.approx(upper, abs=1e-7))
    assert cost(d, w, edges, end_free) == pytest.approx(cost(d, None, edges, end_free), abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_both_ways_to_least_absolute_noises_agree_in_cost(seed: int) -> None:
    """On more points than a dense program can: the sum |nu| that HiGHS finds is the value of the potentials."""
    generator = np.random.default_rng(seed)
    values = np.cumsum(generator.poisson(3, 127)) + np.rint(generator.laplace(0, 9, 127))
    d = np.diff(values, prepend=0.0, append=400.0)
    value = -float(d @ best_potentials(-d, 7, True))
    fitted = tree_l1_program(values, (2,) * 7, 400.0)
    edges = incidence(127, (2,) * 7)
    assert cost(d, np.diff(fitted, prepend=0.0, append=400.0), edges, True) == pytest.approx(value, abs=1e-4)
    assert cost(d, least_absolute_increments(d, 7, True), edges, True) == pytest.approx(value, abs=1e-6)


def test_both_objectives_agree_on_larger_trees() -> None:
    """The function checks itself: the sum |nu| it reaches is the value of the dual, which no smaller sum could be."""
    generator = np.random.default_rng(4)
    for case in range(240):
        levels = 4 + case % 6
        points = (1 << levels) - int(generator.integers(0, 1 << (levels - 1)))
        rate, spread = generator.choice([0.1, 1.0, 10.0]), generator.choice([1, 5, 30])
        values = np.cumsum(generator.poisson(rate, points)) + np.rint(generator.laplace(0, spread, points))
        if case % 3 == 0:
            values = values + generator.normal(size=points)
        upper = float(np.rint(generator.uniform(0, 1.5) * max(values[-1], 1)))
        d = np.diff(values, prepend=0.0, append=upper if case % 2 else values[-1])
        assert least_absolute_increments(d, levels, bool(case % 2)).min() >= 0


def test_potentials_that_are_not_best_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow that would prove them best does not exist."""
    generator = np.random.default_rng(3)
    values = np.cumsum(generator.poisson(1, 31)) + generator.normal(0, 6, 31)
    d = np.diff(values, prepend=0.0, append=40.0)
    least_absolute_increments(d, 5, True)

    def flatter(gains: np.ndarray, levels: int, end_free: bool) -> np.ndarray:
        return np.minimum(best_potentials(gains, levels, end_free), 1)

    monkeypatch.setattr(gaps_l1, "best_potentials", flatter)
    with pytest.raises(AssertionError):
        least_absolute_increments(d, 5, True)


def test_a_curve_that_falls_all_the_way_is_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many gaps as there are are set free at once, not one after the other."""
    calls = []
    whole = GapNetwork.solve

    class Counted(GapNetwork):
        def solve(self, current: np.ndarray, free: np.ndarray) -> np.ndarray:
            calls.append(int(free.sum()))
            return whole(self, current, free)

    points = (1 << 12) - 1
    values = np.arange(points)[::-1].astype(float)
    d = np.diff(values, prepend=0.0, append=5000.0)
    monkeypatch.setattr(gaps, "GapNetwork", Counted)
    w = least_squares_increments(d, (2,) * 12, True)
    assert len(calls) <= 3 and np.count_nonzero(w[1:-1]) == 0
