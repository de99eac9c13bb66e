"""The scale of the noise on trees: linear programs, exact probabilities, and variants that must fail."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from curve_checks import intervals, largest_cost, least_norm, pair_shifts, single_shifts, suffixes, worst_test
from scipy.stats import beta

from lipdp_lightning.curves.discrete_noise import NoiseSource, discrete_laplace
from lipdp_lightning.curves.mechanism import curve_mechanism
from lipdp_lightning.curves.tree import interval_cost, noise_matrix, path_sums, suffix_cost, tree_cost, uniform_fan_outs

RELATIONS = ("replace_one", "add_remove")


@pytest.mark.parametrize("fan_outs", [(2,), (2, 2), (2, 2, 2), (2, 2, 2, 2), (3,), (3, 3), (4, 4), (2, 3), (5, 2)])
@pytest.mark.parametrize("adjacency", RELATIONS)
def test_the_cost_of_one_curve_is_the_linear_programs(fan_outs: tuple[int, ...], adjacency: str) -> None:
    matrix = noise_matrix(fan_outs)
    needed = largest_cost(matrix, single_shifts(matrix.shape[0], adjacency))
    assert tree_cost(fan_outs, adjacency, 1) == pytest.approx(needed, abs=1e-7)


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("adjacency", RELATIONS)
def test_the_cost_of_a_pair_is_the_linear_programs(levels: int, adjacency: str) -> None:
    one = noise_matrix((2,) * levels)
    both = np.kron(np.eye(2), one)
    needed = largest_cost(both, pair_shifts(1 << levels, adjacency))
    assert tree_cost((2,) * levels, adjacency, 2) == pytest.approx(needed, abs=1e-7)


@pytest.mark.parametrize("levels", range(1, 19))
def test_closed_forms_for_base_two(levels: int) -> None:
    half = math.ceil((levels + 1) / 2)
    assert interval_cost((2,) * levels) == levels
    assert suffix_cost((2,) * levels) == half
    assert tree_cost((2,) * levels, "replace_one", 2) == 2 * half
    assert tree_cost((2,) * levels, "add_remove", 2) == half


@pytest.mark.parametrize("forgotten, cost", [(0, 4), (1, 3), (2, 4), (3, math.inf)])
def test_noise_that_forgets_a_level_is_found(forgotten: int, cost: float) -> None:
    """The same check on a tree without one level: L = 3 is not enough, except below the root of four children."""
    matrix = noise_matrix((2, 2, 2))
    sizes = [1, 2, 4, 8]
    start = sum(sizes[:forgotten])
    broken = np.delete(matrix, np.arange(start, start + sizes[forgotten]), axis=1)
    assert largest_cost(broken, list(intervals(8))) == pytest.approx(cost)


def test_two_curves_with_the_same_noise_are_found() -> None:
    """Their difference would be exact: no noise explains a change of one of them."""
    matrix = noise_matrix((2, 2))
    shared = np.vstack([matrix, matrix])
    assert largest_cost(shared, pair_shifts(4, "add_remove")) == math.inf


def test_two_curves_at_half_the_budget_cost_the_whole_budget() -> None:
    """Thesis 6.5.1 calls the sum of two curves of epsilon / 2 "2 epsilon"; it is epsilon, and not epsilon / 2."""
    one = noise_matrix((2, 2, 2))
    single = largest_cost(one, list(suffixes(8)))
    changed = np.concatenate([suffix := worst_suffix(one), -suffix])
    assert least_norm(np.kron(np.eye(2), one), changed) == pytest.approx(2 * single)


def worst_suffix(matrix: np.ndarray) -> np.ndarray:
    return max(suffixes(matrix.shape[0]), key=lambda shift: least_norm(matrix, shift))


def losses(shift: tuple[int, int, int], rate: float) -> np.ndarray:
    """log p(y - shift) / p(y) over a cube, y the first three points of a tree of four leaves; exact sums."""
    reach = 60
    values = np.arange(-reach, reach + 1)
    pmf = np.exp(-rate * np.abs(values)) * (1 - math.exp(-rate)) / (1 + math.exp(-rate))

    def at(k: np.ndarray) -> np.ndarray:
        inside = np.abs(k) <= reach
        return np.where(inside, pmf[np.clip(k, -reach, reach) + reach], 0.0)

    size = 14
    cube = np.arange(-size, size + 1)
    grid = np.arange(-2 * reach, 2 * reach + 1)
    # left[a, b] = sum_m f(m) f(a - m) f(b - m) depends on both children of the left node, right on one child
    moved = at(grid[:, None] - values[None, :])
    left = (moved * pmf) @ moved.T
    right = moved @ pmf

    def probability(y1: np.ndarray, y2: np.ndarray, y3: np.ndarray) -> np.ndarray:
        total = np.zeros(np.broadcast(y1, y2, y3).shape)
        for root in range(-40, 41):
            i, j, k = (np.broadcast_to(y - root + 2 * reach, total.shape) for y in (y1, y2, y3))
            total += at(np.array([root]))[0] * left[i, j] * right[k]
        return total

    y = cube[:, None, None], cube[None, :, None], cube[None, None, :]
    return np.log(probability(*(a - s for a, s in zip(y, shift, strict=True))) / probability(*y))


def test_the_exact_likelihood_ratio_reaches_the_bound_and_no_more() -> None:
    """Discrete Laplace of scale 1 on four leaves: every replacement costs at most L = 2, and one costs 2."""
    worst = 0.0
    for shift in intervals(4):
        change = tuple(int(v) for v in shift[:3])
        loss = losses(change, 1.0)
        bound = least_norm(noise_matrix((2, 2)), shift)
        assert np.max(np.abs(loss)) <= bound + 1e-6
        worst = max(worst, float(np.max(np.abs(loss))))
    assert 1.85 < worst <= 2 + 1e-6  # 2 is reached in the limit of far outputs
    # an epsilon of L - 1 = 1 at this scale, or the scale (L - 1) / epsilon, would be a false claim
    assert worst > 1.5


def lower_bound(levels: int, divide_scale: int, runs: int = 40_000) -> float:
    """A lower bound on epsilon, valid with probability 0.999, from the best linear test on two neighbours."""
    mechanism = curve_mechanism("laplace", levels, 1.0)
    matrix = noise_matrix(mechanism.fan_outs)[:-1]
    shift = max(intervals(1 << levels), key=lambda s: least_norm(matrix, s[:-1]))[:-1]
    test = worst_test(matrix, shift)
    stream = NoiseSource(bytes(16)).stream()

    def draw(count: int) -> np.ndarray:
        return discrete_laplace(stream, count, mechanism.scale / divide_scale).astype(np.float64)

    noise = path_sums(draw, mechanism.fan_outs, 2 * runs)[:, :-1] @ test
    first, second = noise[:runs] + shift @ test, noise[runs:]
    best = 0.0
    for share in (0.5, 0.8, 0.95):
        threshold = np.quantile(second, share)
        hits, misses = int(np.sum(first > threshold)), int(np.sum(second > threshold))
        low = beta.ppf(0.0005, hits, runs - hits + 1)
        high = beta.ppf(0.9995, misses + 1, runs - misses)
        best = max(best, math.log(low / high))
    return best


def test_an_attack_stays_below_epsilon_and_finds_too_little_noise() -> None:
    assert 0.25 < lower_bound(3, 1) < 1.0
    assert lower_bound(3, 4) > 1.0


def test_noise_is_drawn_once_per_node_and_shared_by_its_leaves() -> None:
    matrix = noise_matrix((2, 3))
    assert matrix.shape == (6, 1 + 2 + 6)
    assert (matrix.sum(axis=1) == 3).all()  # root, one child, one leaf
    assert sorted(matrix.sum(axis=0).tolist()) == [1.0] * 6 + [3.0] * 2 + [6.0]
    same = [a @ b for a, b in itertools.combinations(matrix, 2)]
    assert same.count(2.0) == 6 and same.count(1.0) == 9  # siblings share two noises, the others the root's


def test_a_base_that_makes_no_tree_is_refused() -> None:
    with pytest.raises(ValueError, match="base 1"):
        uniform_fan_outs(8, 1)
    assert uniform_fan_outs(9, 3) == (3, 3) and uniform_fan_outs(10, 3) == (3, 3, 3)
