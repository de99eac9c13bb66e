"""Sharing the noise among groups: lipdp_lightning/mechanism/allocation.py."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lipdp_lightning.mechanism.allocation import allocate, joint_thresholds, squared_release

SENSITIVITIES = {"features.0": 2.5, "features.2": 0.3, "head": 1.4}
SIZES = {"features.0": 160, "features.2": 9000, "head": 650}
WEIGHTS = {"features.*": 0.15, "head": 0.85}
SIGMA = 1.1
ALLOCATIONS = ["equal", "global", "optimal", "custom"]

Allocate = Callable[..., dict[str, float]]


def weights_of(allocation: str) -> dict[str, float] | None:
    return WEIGHTS if allocation == "custom" else None


def keeps_the_joint_condition(deviations: dict[str, float], noise_multiplier: float = SIGMA) -> bool:
    """Equation of 'what is released', evaluated independently of the code under test."""
    released = sum((SENSITIVITIES[name] / deviations[name]) ** 2 for name in SENSITIVITIES)
    return released <= (1 + 1e-12) / noise_multiplier**2


def total_noise(deviations: dict[str, float]) -> float:
    return sum(SIZES[name] * deviations[name] ** 2 for name in SIZES)


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_allocations_spend_exactly_the_budget(allocation: str) -> None:
    deviations = allocate(SENSITIVITIES, SIZES, SIGMA, allocation, weights=weights_of(allocation))
    assert list(deviations) == list(SENSITIVITIES)
    assert keeps_the_joint_condition(deviations)
    assert squared_release(SENSITIVITIES, deviations) == pytest.approx(1 / SIGMA**2, rel=1e-12)


def test_values_of_the_table() -> None:
    root_of_squares = math.sqrt(2.5**2 + 0.3**2 + 1.4**2)
    isotropic = allocate(SENSITIVITIES, SIZES, SIGMA, "global")
    assert isotropic == dict.fromkeys(SIZES, pytest.approx(SIGMA * root_of_squares))
    equal = allocate(SENSITIVITIES, SIZES, SIGMA, "equal")
    assert equal["head"] == pytest.approx(SIGMA * math.sqrt(3) * 1.4)
    custom = allocate(SENSITIVITIES, SIZES, SIGMA, "custom", weights=WEIGHTS)
    assert custom["head"] == pytest.approx(SIGMA * 1.4 / math.sqrt(0.85))
    assert custom["features.0"] == pytest.approx(SIGMA * 2.5 / math.sqrt(0.075))  # a pattern's share is divided
    scale = 2.5 * math.sqrt(160) + 0.3 * math.sqrt(9000) + 1.4 * math.sqrt(650)
    optimal = allocate(SENSITIVITIES, SIZES, SIGMA, "optimal")
    assert optimal["features.2"] == pytest.approx(SIGMA * math.sqrt(scale * 0.3 / math.sqrt(9000)))


def without_sqrt_of_the_group_count() -> dict[str, float]:
    return {name: SIGMA * value for name, value in SENSITIVITIES.items()}


def largest_sensitivity_for_all() -> dict[str, float]:
    return dict.fromkeys(SENSITIVITIES, SIGMA * max(SENSITIVITIES.values()))


def mean_square_for_all() -> dict[str, float]:
    mean = sum(value**2 for value in SENSITIVITIES.values()) / len(SENSITIVITIES)
    return dict.fromkeys(SENSITIVITIES, SIGMA * math.sqrt(mean))


def weights_without_a_root() -> dict[str, float]:
    return {"features.0": SIGMA * 2.5 / 0.9, "features.2": SIGMA * 0.3 / 0.9, "head": SIGMA * 1.4 / 0.9}


@pytest.mark.parametrize(
    "broken",
    [
        without_sqrt_of_the_group_count,
        largest_sensitivity_for_all,
        mean_square_for_all,
        weights_without_a_root,
    ],
)
def test_broken_allocations_fail_the_joint_condition(broken: Callable[[], dict[str, float]]) -> None:
    assert not keeps_the_joint_condition(broken())


def test_forgotten_root_releases_the_group_count() -> None:
    assert squared_release(SENSITIVITIES, without_sqrt_of_the_group_count()) == pytest.approx(3 / SIGMA**2)


def no_competitor_has_less_noise(allocation: str) -> bool:
    """200 random problems x 200 random competitors that spend the same budget."""
    generator = np.random.default_rng(0)
    for _ in range(200):
        count = int(generator.integers(2, 9))
        names = [f"layer{index}" for index in range(count)]
        values = generator.lognormal(0, 2, count)
        sizes = generator.integers(1, 100_000, count)
        sigma = float(generator.uniform(0.3, 5))
        given = allocate(
            dict(zip(names, values.tolist(), strict=True)),
            dict(zip(names, sizes.tolist(), strict=True)),
            sigma,
            allocation,
        )
        noise = sum(sizes[index] * given[name] ** 2 for index, name in enumerate(names))
        shares = generator.dirichlet(np.full(count, 0.5), 100)
        nearby = (values / np.array(list(given.values()))) ** 2 * generator.lognormal(0, 0.05, (100, count))
        shares = np.concatenate([shares, nearby])
        shares = np.clip(shares / shares.sum(1, keepdims=True), 1e-300, None)
        competitors = (sizes * (sigma * values) ** 2 / shares).sum(1)  # Delta_k^2 / sigma_k^2 = share / sigma^2
        if (competitors < noise * (1 - 1e-9)).any():
            return False
    return True


def test_optimal_allocation_has_the_least_total_noise() -> None:
    assert no_competitor_has_less_noise("optimal")
    assert not no_competitor_has_less_noise("global")
    assert not no_competitor_has_less_noise("equal")


values = st.floats(1e-6, 1e6)


@given(
    st.lists(st.tuples(values | st.just(0.0), st.integers(1, 10**8)), min_size=1, max_size=12),
    st.floats(1e-2, 1e2),
    st.sampled_from(["equal", "global", "optimal"]),
)
def test_joint_release_never_exceeds_the_budget(groups: list[tuple[float, int]], sigma: float, allocation: str) -> None:
    sensitivities = {str(index): value for index, (value, _) in enumerate(groups)}
    sizes = {str(index): size for index, (_, size) in enumerate(groups)}
    deviations = allocate(sensitivities, sizes, sigma, allocation)
    assert squared_release(sensitivities, deviations) <= (1 + 1e-12) / sigma**2
    for name, value in sensitivities.items():
        assert (deviations[name] > 0) == (value > 0)


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_silent_groups_get_no_noise_and_are_not_counted(allocation: str) -> None:
    sensitivities = SENSITIVITIES | {"features.2": 0.0}
    deviations = allocate(sensitivities, SIZES, SIGMA, allocation, weights=weights_of(allocation))
    assert deviations["features.2"] == 0.0
    assert squared_release(sensitivities, deviations) == pytest.approx(1 / SIGMA**2)
    if allocation == "equal":
        assert deviations["head"] == pytest.approx(SIGMA * math.sqrt(2) * 1.4)


def test_release_of_a_moving_group_without_noise_is_infinite() -> None:
    assert squared_release({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.0}) == math.inf
    with pytest.raises(KeyError):
        squared_release({"a": 1.0}, {})


@pytest.mark.parametrize("weight", [0.0, -0.5, math.nan, math.inf])
def test_weights_that_are_no_share_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=r"the weight of 'head'.*\n.*HINT"):
        allocate(SENSITIVITIES, SIZES, SIGMA, "custom", weights={"features.*": 1.0, "head": weight})


def test_requests_that_cannot_be_private_are_refused_all_at_once() -> None:
    with pytest.raises(ValueError) as refusal:
        allocate({"a": math.inf, "b": math.nan, "c": -1.0}, {"a": 1, "b": 1}, 0.0, "best")  # type: ignore[arg-type]
    message = str(refusal.value)
    for part in (
        "noise_multiplier is 0",
        "group a",
        "group b",
        "group c",
        "no parameters",
        "'best'",
    ):
        assert part in message
    for allocation, weights in (("custom", None), ("equal", WEIGHTS)):
        with pytest.raises(ValueError, match="HINT"):
            allocate(SENSITIVITIES, SIZES, SIGMA, allocation, weights=weights)
    for sigma in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="HINT"):
            allocate(SENSITIVITIES, SIZES, sigma, "equal")


def jointly_scaled_release(thresholds: dict[str, float], norms: np.ndarray) -> float:
    """The worst sum_k ||c_i g_ik||^2 / tau_k^2 over examples whose gradients reach l_k n_ik."""
    ratios = norms / np.array(list(thresholds.values()))
    scale = 1 / np.sqrt((ratios**2).sum(1, keepdims=True))
    return float(((scale * ratios) ** 2).sum(1).max())


def scaled_per_group(thresholds: dict[str, float], norms: np.ndarray) -> float:
    """Each group brought to its own threshold: forgets that the groups of one example add up."""
    ratios = norms / np.array(list(thresholds.values()))
    return float(((ratios / ratios) ** 2).sum(1).max())


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_joint_thresholds_hold_as_a_whole(allocation: str) -> None:
    thresholds = joint_thresholds(SENSITIVITIES, SIZES, allocation, weights=weights_of(allocation))
    limits = np.array(list(SENSITIVITIES.values()))
    norms = np.random.default_rng(1).uniform(0.01, 1, (1000, 3)) * limits
    assert jointly_scaled_release(thresholds, norms) <= 1 + 1e-12
    assert scaled_per_group(thresholds, norms) > 1 + 1e-12
    # norms below their worst case: the example is scaled up, never down
    scales = 1 / np.sqrt(((norms / np.array(list(thresholds.values()))) ** 2).sum(1))
    assert scales.min() >= 1
    deviations = {name: SIGMA * threshold for name, threshold in thresholds.items()}
    assert deviations == pytest.approx(
        allocate(SENSITIVITIES, SIZES, SIGMA, allocation, weights=weights_of(allocation))
    )


def test_silent_groups_have_no_threshold() -> None:
    assert joint_thresholds({"a": 0.0, "b": 1.0}, {"a": 1, "b": 1}) == {"a": 0.0, "b": 1.0}
