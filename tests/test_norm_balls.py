"""Projections: what is stored is certified within the radius, in every dtype."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lipdp_lightning.norm_balls import (
    KINDS,
    Bjorck,
    Clip,
    ClipSingular,
    Fixed,
    Frobenius,
    Projection,
    resolve_projection,
)
from lipdp_lightning.norms import Convolution, Dense, Operator, conv_norm, dense_norm, kappa

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
conv = Convolution(padding=1, input_size=8)
KAPPA = kappa((3, 3), padding=1)


def random_weight(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def conv_truth(kernel: Tensor, size: int = 8) -> float:
    layer = nn.Conv2d(kernel.shape[1], kernel.shape[0], 3, padding=1, bias=False).double()
    layer.weight.data.copy_(kernel)
    count = kernel.shape[1] * size**2
    basis = torch.eye(count, dtype=torch.float64).reshape(count, kernel.shape[1], size, size)
    with torch.no_grad():
        return float(torch.linalg.svdvals(layer(basis).flatten(1))[0])


def stored_above(project: Callable[[Tensor, float], float], dtype: torch.dtype) -> int:
    """Of 60 dense weights, how many are stored with a certified norm above the radius, or misreport it."""
    count = 0
    for seed in range(60):
        radius = (1.0, 0.7, 3.0)[seed % 3]
        weight = random_weight(seed, 7, 11, dtype=dtype)
        reported = project(weight, radius)
        assert weight.dtype == dtype
        count += dense_norm(weight) > radius or reported > radius or reported < dense_norm(weight) * (1 - 1e-9)
    return count


RULES = {kind: (lambda w, c, kind=kind: KINDS[kind](c).apply_(w, Dense())) for kind in KINDS}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_stored_dense_weight_is_within_the_radius(kind: str, dtype: torch.dtype) -> None:
    assert stored_above(RULES[kind], dtype) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaling_in_the_dtype_without_a_second_certificate_fails_the_same_check(dtype: torch.dtype) -> None:
    def naive(weight: Tensor, radius: float) -> float:
        weight.mul_(radius / dense_norm(weight))
        return radius

    assert stored_above(naive, dtype) > 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_stored_convolution_is_within_what_is_documented(kind: str, dtype: torch.dtype) -> None:
    for seed in range(8):
        kernel = random_weight(seed, 4, 3, 3, 3, dtype=dtype)
        reported = KINDS[kind](0.8).apply_(kernel, conv)
        norm = conv_truth(kernel.double())
        allowed = 0.8 if kind in ("clip", "fixed", "clip_singular") else 0.8 * KAPPA * (1 + 1e-12)
        assert norm * (1 - 1e-12) <= reported <= allowed


@pytest.mark.parametrize("kind", ["clip", "clip_singular", "frobenius"])
def test_weights_inside_are_untouched(kind: str) -> None:
    weight = random_weight(0, 5, 5, dtype=torch.float32)
    weight.mul_(0.1 / float(weight.norm()))
    before = weight.clone()
    reported = KINDS[kind](1.0).apply_(weight, Dense())
    assert torch.equal(weight, before)
    assert reported == dense_norm(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_projecting_twice_changes_next_to_nothing(kind: str, dtype: torch.dtype) -> None:
    once = random_weight(1, 6, 9, dtype=dtype)
    KINDS[kind](1.0).apply_(once, Dense())
    twice = once.clone()
    KINDS[kind](1.0).apply_(twice, Dense())
    limit = 1e-3 if kind == "bjorck" else 1e-8 + 8 * torch.finfo(dtype).eps
    assert float((twice - once).norm()) <= limit * float(once.norm())


def test_clip_keeps_the_direction_and_uses_the_whole_radius() -> None:
    weight = random_weight(2, 6, 9, dtype=torch.float32)
    original = weight.clone()
    assert 1.0 - 1e-5 <= Clip(1.0).apply_(weight, Dense()) <= 1.0
    assert torch.allclose(weight / weight.norm(), original / original.norm(), rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_fixed_scales_up_and_down(scale: float) -> None:
    weight = random_weight(3, 4, 6, dtype=torch.float32) * scale
    assert 2.0 * (1 - 1e-5) <= Fixed(2.0).apply_(weight, Dense()) <= 2.0


def test_fixed_certified_norm_of_a_convolution_is_the_radius() -> None:
    kernel = random_weight(4, 4, 3, 3, 3, dtype=torch.float32)

    class Fast(Dense):
        def norm(self, weight: Tensor, name: str = "weight") -> float:
            return conv_norm(weight, padding=1, input_size=32, method="fast")

    assert Fixed(1.0).apply_(kernel, Fast()) > 1.0 - 1e-5
    assert conv_truth(kernel.double()) < 0.95  # the slack of the bound, not of the scaling


@pytest.mark.parametrize("kind", KINDS)
def test_zero_weight_stays_zero(kind: str) -> None:
    weight = torch.zeros(3, 4)
    assert KINDS[kind](1.0).apply_(weight, Dense()) == 0.0
    assert not weight.any()


def test_clip_singular_is_the_euclidean_projection() -> None:
    """Nearest point of a convex set C: <W - P, V - P> <= 0 for every V in C."""
    weight = random_weight(5, 6, 8)
    projected = weight.clone()
    ClipSingular(1.0).apply_(projected, Dense())
    radial = weight.clone()
    Clip(1.0).apply_(radial, Dense())
    products = []
    for seed in range(50):
        other = random_weight(100 + seed, 6, 8)
        other = other / dense_norm(other)
        assert float(((weight - projected) * (other - projected)).sum()) <= 1e-6
        products.append(float(((weight - radial) * (projected - radial)).sum()))
    assert max(products) > 0.1  # the radial one fails the same inequality
    assert float((weight - projected).norm()) < float((weight - radial).norm())


def test_clip_singular_takes_groups_and_shape_apart() -> None:
    kernel = random_weight(6, 4, 2, 3, 3)
    ungrouped = kernel.clone()
    reported = ClipSingular(1.0).apply_(kernel, Convolution(padding=1, input_size=8, groups=2))
    assert reported <= 1.0
    for block in kernel.chunk(2):
        assert dense_norm(block.flatten(1)) == pytest.approx(1 / KAPPA, rel=1e-6)
    ClipSingular(1.0).apply_(ungrouped, conv)
    assert not torch.allclose(kernel, ungrouped)


def descend(projection: Projection) -> Tensor:
    """Projected gradient descent on |W - diag(2, 1/2)|^2 / 2 over the spectral unit ball."""
    target = torch.diag(torch.tensor([2.0, 0.5], dtype=torch.float64))
    weight = torch.eye(2, dtype=torch.float64) * 0.1
    for _ in range(400):
        weight -= 0.1 * (weight - target)
        projection.apply_(weight, Dense())
    return weight


def test_radial_scaling_stops_short_of_the_optimum_that_the_projection_reaches() -> None:
    optimum = torch.diag(torch.tensor([1.0, 0.5], dtype=torch.float64))
    assert torch.allclose(descend(ClipSingular(1.0)), optimum, atol=1e-6)
    radial = descend(Clip(1.0))
    assert torch.allclose(radial, torch.diag(torch.tensor([1.0, 0.25], dtype=torch.float64)), atol=1e-6)
    assert not torch.allclose(radial, optimum, atol=0.1)


def test_bjorck_step_maps_zero_to_two_into_the_unit_interval() -> None:
    def step(values: Tensor) -> Tensor:
        return values * (3.0 - values**2) / 2.0

    values = torch.linspace(0.0, 2.0, 20001, dtype=torch.float64)
    assert float(step(values).abs().max()) <= 1.0
    assert float(step(values).min()) == -1.0
    assert float(step(torch.tensor(2.001, dtype=torch.float64)).abs()) > 1.0
    inside = values[values <= 1.0]
    assert float(step(inside).min()) >= 0.0


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 20])
def test_one_certificate_serves_any_number_of_bjorck_steps(steps: int) -> None:
    for scale in (1e-6, 1.0, 50.0):
        weight = random_weight(7, 8, 5) * scale
        reported = Bjorck(1.0, steps).apply_(weight, Dense())
        assert torch.linalg.svdvals(weight)[0] <= reported <= 1.0
        assert dense_norm(weight) <= 1.0


@pytest.mark.parametrize("seed", range(6))
def test_bjorck_orthogonalises(seed: int) -> None:
    weight = random_weight(seed, 5, 9, dtype=torch.float32)
    directions = torch.linalg.svd(weight, full_matrices=False)
    Bjorck(2.0, 20).apply_(weight, Dense())
    assert torch.allclose(weight, 2.0 * directions.U @ directions.Vh, atol=1e-5)


@pytest.mark.parametrize("kind", [Bjorck, Frobenius])
def test_reshaped_kernel_within_one_does_not_bound_the_convolution_by_one(kind: type[Projection]) -> None:
    kernel = torch.ones(1, 1, 3, 3, dtype=torch.float64)
    reported = kind(1.0).apply_(kernel, conv)
    assert dense_norm(kernel.flatten(1)) <= 1.0 + 1e-12
    assert 2.5 < conv_truth(kernel) <= reported <= KAPPA


def test_a_norm_that_ignores_its_argument_is_refused() -> None:
    class Constant(Operator):
        def norm(self, weight: Tensor, name: str = "weight") -> float:
            return 2.0

        def deviation_factor(self, weight: Tensor) -> float:
            return 1.0

    with pytest.raises(ValueError, match="HINT"):
        Clip(1.0).apply_(random_weight(9, 3, 3), Constant())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("radius", [0.0, -1.0, math.nan, math.inf])
def test_bad_radius_is_refused(kind: str, radius: float) -> None:
    with pytest.raises(ValueError, match="HINT"):
        KINDS[kind](radius)


def test_bad_kind_and_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"(?s)spectral.*HINT"):
        resolve_projection(["layer"], "spectral", 1.0)
    with pytest.raises(ValueError, match="HINT"):
        ClipSingular(1.0).apply_(torch.ones(3), Dense())
    with pytest.raises(ValueError, match="HINT"):
        Bjorck(1.0).apply_(torch.ones(3, 1, 3, 3), Convolution(groups=2))


def test_non_finite_weight_is_refused_and_left_alone() -> None:
    for kind in KINDS:
        weight = torch.eye(2)
        weight[0, 1] = math.nan
        with pytest.raises(ValueError, match="HINT"):
            KINDS[kind](0.5).apply_(weight, Dense())
        assert float(weight[0, 0]) == 1.0


def test_parameters_that_require_gradients_are_projected_in_place() -> None:
    layer = nn.Linear(4, 4)
    storage = layer.weight.data_ptr()
    for kind in KINDS:
        KINDS[kind](0.1).apply_(layer.weight, Dense())
    assert layer.weight.data_ptr() == storage and layer.weight.requires_grad
    assert dense_norm(layer.weight) <= 0.1


NAMES = ("features.0", "features.3", "head")


def test_one_radius_for_all_and_free_layers() -> None:
    rules = resolve_projection(NAMES, "clip", 2.0, free=["head"])
    assert rules == {
        "features.0": Clip(2.0),
        "features.3": Clip(2.0),
        "head": None,
    }
    assert tuple(rules) == NAMES


def test_first_matching_pattern_counts() -> None:
    rules = resolve_projection(NAMES, "fixed", {"*.3": 3.0, "features.*": 1.0, "head": None})
    assert [r and r.max_norm for r in rules.values()] == [1.0, 3.0, None]
    other = resolve_projection(NAMES, "fixed", {"features.*": 1.0, "*.3": 3.0, "*": 5.0})
    assert [r and r.max_norm for r in other.values()] == [1.0, 1.0, 5.0]


def test_all_problems_of_a_configuration_are_named_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        resolve_projection(NAMES, "clamp", {"feature.*": 1.0, "head": -2.0}, free=["tail"])
    message = str(caught.value)
    for part in ("clamp", "'feature.*' matches no", "-2.0", "'tail' matches no", "'features.0' matches no pattern"):
        assert part in message
    assert "HINT" in message and "features.3" in message
