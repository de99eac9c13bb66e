"""Distribution functions on public grids, their quantiles, bands and ranges, and continual sums."""

from __future__ import annotations

import numpy as np
import pytest

from lipdp_lightning.curves import (
    ContinualSum,
    Grid,
    NoiseSource,
    PrivateECDF,
    curve_mechanism,
    ecdf_band,
    find_range,
    histogram,
    private_ecdf,
    quantile,
)
from lipdp_lightning.curves.bands import as_fractions, count_band
from lipdp_lightning.curves.discrete_noise import discrete_laplace_variance
from lipdp_lightning.curves.quantiles import crossing
from lipdp_lightning.curves.releases import gaussian_delta
from lipdp_lightning.curves.tree import noise_matrix

SECRET = bytes(16)
LOUD = 1e4  # an epsilon at which discrete noise is zero


def values(count: int = 2000, seed: int = 0) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).normal(50, 12, count), 0, 100)


def released(epsilon: float = 1.0, seed: int = 0, adjacency: str = "replace_one", levels: int = 7) -> PrivateECDF:
    grid = Grid(0.0, 100.0, levels)
    source = NoiseSource(bytes([seed % 256, seed // 256]) * 8)
    return private_ecdf(values(), grid, curve_mechanism("laplace", levels, epsilon, adjacency=adjacency), source)


@pytest.mark.parametrize("adjacency", ["replace_one", "add_remove"])
def test_without_noise_it_is_the_empirical_function_at_the_points(adjacency: str) -> None:
    curve = released(LOUD, adjacency=adjacency)
    truth = np.array([np.mean(values() <= t) for t in curve.grid.points])
    assert curve.fractions == pytest.approx(truth, abs=1e-12)
    assert curve.smoothed().fractions == pytest.approx(truth, abs=1e-12)
    assert curve.evaluate([-1.0, 50.0, 100.0]) == pytest.approx([0.0, np.mean(values() <= 50), 1.0])


def test_values_on_grid_points_belong_to_the_cell_that_ends_there() -> None:
    grid = Grid(0.0, 1.0, 2)
    assert grid.cells([0.0, 0.25, 0.26, 0.5, 1.0]).tolist() == [0, 0, 1, 1, 3]


@pytest.mark.parametrize("bad", [-0.01, 100.01, np.nan, np.inf])
def test_values_outside_the_declared_range_are_refused_and_not_shown(bad: float) -> None:
    data = np.append(values(), bad)
    with pytest.raises(ValueError) as caught:
        private_ecdf(data, Grid(0.0, 100.0, 7), curve_mechanism("laplace", 7, 1.0), NoiseSource(SECRET))
    assert str(bad) not in str(caught.value)


def test_grid_ends_from_the_data_would_publish_a_record() -> None:
    """Thesis 6.3.1 puts tau_1 and tau_N at the extremes: neighbours then have outputs on disjoint points."""
    data = values()
    neighbour = data.copy()
    neighbour[np.argmax(data)] = data.max() - 0.5
    theirs = [Grid(x.min(), x.max(), 4).points.tolist() for x in (data, neighbour)]
    assert not set(theirs[0]) & set(theirs[1])  # whatever the noise, one look tells them apart
    grid, design = Grid(0.0, 100.0, 4), curve_mechanism("laplace", 4, 1.0)
    ours = [private_ecdf(x, grid, design, NoiseSource()).grid.points.tolist() for x in (data, neighbour)]
    assert ours[0] == ours[1]


@pytest.mark.parametrize("arguments", [(1.0, 1.0, 4), (0.0, np.inf, 4), (0.0, 1.0, 0), (1.0, 1.0 + 1e-15, 10)])
def test_a_grid_that_is_none_is_refused(arguments: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError, match="HINT"):
        Grid(*arguments)


def test_the_size_is_released_only_where_it_is_public() -> None:
    assert released(0.5).counts[-1] == 2000
    noisy = {released(0.5, seed, "add_remove").counts[-1] for seed in range(5)}
    assert len(noisy) > 1


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.99, 1.0])
def test_bisection_finds_the_first_crossing_of_a_monotone_curve(probability: float) -> None:
    fractions = released().smoothed().fractions
    assert crossing(fractions, probability) == int(np.argmax(fractions >= probability))


def test_bisection_finds_a_crossing_of_any_curve() -> None:
    fractions = released(0.05).fractions
    for p in np.linspace(0.05, 0.95, 19):
        index = crossing(fractions, p)
        assert fractions[index] >= p and (index == 0 or fractions[index - 1] < p)


def test_quantiles_are_near_the_true_ones() -> None:
    curve = released(1.0).smoothed()
    for p in (0.1, 0.5, 0.9):
        assert quantile(curve, p) == pytest.approx(np.quantile(values(), p), abs=4.0)
    assert quantile(released(LOUD), 0.5) == pytest.approx(np.quantile(values(), 0.5), abs=100 / 128)


def test_the_histogram_adds_up_and_states_its_noise() -> None:
    curve = released(1.0)
    bins = histogram(curve, 8)
    assert bins.counts.sum() == pytest.approx(curve.counts[-1])
    truth = np.histogram(values(), bins.edges)[0]
    errors = np.array([histogram(released(1.0, seed), 8, repeats=2).counts - truth for seed in range(200)])
    assert errors.std(axis=0) == pytest.approx(bins.deviations, rel=0.25)
    with pytest.raises(ValueError, match="divide"):
        histogram(curve, 7)


def covered(adjacency: str, factor: float, runs: int = 100) -> float:
    """How often the whole empirical function lies in the band, its width multiplied by a factor."""
    truth = np.array([np.mean(values() <= t) for t in Grid(0.0, 100.0, 7).points])
    hits = 0
    for seed in range(runs):
        curve = released(0.5, seed, adjacency)
        band = ecdf_band(curve, 0.9, repeats=99, generator=np.random.default_rng(seed))
        middle = curve.fractions
        lower = np.minimum(band.lower, middle) if factor == 1 else middle - factor * (middle - band.lower)
        upper = np.maximum(band.upper, middle) if factor == 1 else middle + factor * (band.upper - middle)
        hits += bool(np.all(lower <= truth + 1e-12) and np.all(truth <= upper + 1e-12))
    return hits / runs


@pytest.mark.parametrize("adjacency", ["replace_one", "add_remove"])
def test_the_band_covers_the_whole_curve_and_half_of_it_does_not(adjacency: str) -> None:
    assert covered(adjacency, 1.0) >= 0.82  # 0.9, with a hundred runs
    assert covered(adjacency, 0.4) < 0.7


def test_a_band_with_the_sampling_error_is_wider_and_holds_the_population() -> None:
    from scipy.stats import norm

    curve = released(1.0)
    narrow = ecdf_band(curve, 0.95, generator=np.random.default_rng(0))
    wide = ecdf_band(curve, 0.95, sampling=True, generator=np.random.default_rng(0))
    assert np.mean(wide.upper - wide.lower) > np.mean(narrow.upper - narrow.lower) + 0.03
    population = norm.cdf(curve.grid.points[:-1], 50, 12)
    assert np.all(wide.lower[:-1] <= population) and np.all(population <= wide.upper[:-1])
    low, high = wide.quantile_interval(curve.grid.edges, 0.5)
    assert low < 50 < high
    with pytest.raises(ValueError, match="simulations"):
        ecdf_band(curve, 0.9999, repeats=50)


def test_bounds_on_counts_become_bounds_on_shares() -> None:
    mechanism = curve_mechanism("laplace", 3, 1.0, adjacency="add_remove")
    counts = np.array([3.0, 1, 9, 20, 18, 30, 44, 40])
    low, high = count_band(counts, mechanism, 0.5)
    assert np.all(np.diff(low) >= 0) and np.all(np.diff(high) >= 0) and low[0] >= 0
    first, last = as_fractions(low, high)
    assert np.all(first <= last) and first[-1] == last[-1] == 1


@pytest.mark.parametrize("data, expected", [(values(), (0.0, 128.0)), (-values() / 1000, (-0.125, 0.0))])
def test_a_range_is_found_among_public_candidates(data: np.ndarray, expected: tuple[float, float]) -> None:
    ranges = [find_range(data, 2.0, "replace_one", NoiseSource(bytes([s]) * 16)) for s in range(20)]
    assert all(found.release.epsilon == 2.0 for found in ranges)
    covers = [(found.low <= np.quantile(data, 0.01)) and (found.high >= np.quantile(data, 0.99)) for found in ranges]
    assert sum(covers) >= 18
    sizes = np.median([max(-found.low, found.high) for found in ranges])
    assert max(-expected[0], expected[1]) / 2 <= sizes <= 4 * max(-expected[0], expected[1])


def test_the_utility_of_a_range_changes_by_one_record_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    import lipdp_lightning.curves.range_finding as module

    seen: list[list[int]] = []

    def record(stream: object, utilities: list[int], sensitivity: int, epsilon: float) -> int:
        assert sensitivity == 1024 and epsilon == 0.5
        seen.append(list(utilities))
        return 20 if len(utilities) > 3 else 0

    monkeypatch.setattr(module, "permute_and_flip", record)
    generator = np.random.default_rng(0)
    data = generator.normal(size=30)
    for change in (np.delete(data, 0), np.append(data[1:], 1e9), np.append(data[1:], -5.0), np.append(data, 3.0)):
        seen.clear()
        for rows in (data, change):
            find_range(rows, 1.0, "replace_one", NoiseSource(SECRET))
        for before, after in ((seen[0], seen[2]), (seen[1], seen[3])):
            assert max(abs(a - b) for a, b in zip(before, after, strict=True)) <= 1024


def test_continual_sums_are_running_sums_with_the_trees_noise() -> None:
    exact = ContinualSum(10, LOUD * 1e6, NoiseSource(SECRET), low=-1.0, high=3.0)
    stream = np.random.default_rng(0).uniform(-1, 3, 10)
    assert [exact.add(x) for x in stream] == pytest.approx(np.cumsum(stream), abs=1e-3)
    with pytest.raises(ValueError, match="10 steps"):
        exact.add(0.0)
    assert exact.cost == 3  # ceil((4 + 1) / 2)


def test_the_noise_of_continual_sums() -> None:
    runs = []
    for seed in range(300):
        total = ContinualSum(8, 1.0, NoiseSource(bytes([seed % 256, seed // 256]) * 8))
        runs.append([total.add(0.0) for _ in range(8)])
    noise = np.array(runs)
    assert total.scale >= total.cost * 65536  # the cost of a suffix, in units of the fixed point, at epsilon 1
    one = discrete_laplace_variance(total.scale) / (1 << 32)
    assert noise.var(axis=0) == pytest.approx(np.full(8, 4 * one), rel=0.35)  # four levels at every step
    correlation = np.corrcoef(noise.T)
    assert correlation[0, 1] == pytest.approx(0.75, abs=0.12)  # they share all but the leaf
    assert correlation[3, 4] == pytest.approx(0.25, abs=0.12)  # they share the root only


def test_gaussian_noise_of_continual_sums_meets_its_epsilon_and_delta() -> None:
    """Against the exact distance of two streams that differ in one step, at every step, and the measured noise."""
    epsilon, delta = 0.8, 1e-5
    total = ContinualSum(8, epsilon, NoiseSource(SECRET), low=-1.0, high=1.0, delta=delta)
    matrix = noise_matrix((2, 2, 2))
    deviation = float(total.scale) / 65536 * 2  # in units of the values
    covariance = deviation**2 * matrix @ matrix.T
    shifts = [np.where(np.arange(8) >= step, 2.0, 0.0) for step in range(8)]
    farthest = max(float(np.sqrt(shift @ np.linalg.solve(covariance, shift))) for shift in shifts)
    assert 0.99 * delta < gaussian_delta(epsilon, 1 / farthest) <= delta
    assert gaussian_delta(epsilon, 0.9 / farthest) > delta
    assert total.booking().rho == pytest.approx(farthest**2 / 2, rel=1e-6) and total.booking().delta == delta
    streams = (ContinualSum(8, epsilon, NoiseSource(bytes([i]) * 16), -1.0, 1.0, delta=delta) for i in range(250))
    noise = np.array([[stream.add(0.0) for _ in range(8)] for stream in streams])
    assert noise.std(axis=0) == pytest.approx(np.full(8, 2 * deviation), rel=0.2)


def test_a_stream_outside_its_bounds_is_refused() -> None:
    total = ContinualSum(4, 1.0, NoiseSource(SECRET))
    for bad in (1.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match="outside"):
            total.add(bad)
    with pytest.raises(ValueError, match="steps"):
        ContinualSum(0, 1.0, NoiseSource(SECRET))
