"""The tests of paper 002 on opacus and on this library's own step, for SGD and Adam."""

from __future__ import annotations

import math

import pytest
import torch
from broken_training import dp_sgd
from torch import nn

from lipdp_lightning.audit.blackbox import (
    HyperParameters,
    Implementation,
    black_box_depth_finding,
    black_box_findings,
    bound_finding,
    calibration_finding,
    choose_bound,
    choose_noise,
    opacus_implementation,
    our_implementation,
    per_example_finding,
)
from lipdp_lightning.audit.blackbox.black_box import Optimizer, network, one_example_among_zeros, random_data
from lipdp_lightning.audit.blackbox.bound_tests import slope_p_value

OURS = ("joint", "exact")
SGD = HyperParameters(1.0)
ADAM = HyperParameters(1.0, learning_rate=0.01, optimizer="adam")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adam", marks=pytest.mark.slow)])
def test_opacus_passes_the_three_tests_and_the_adapted_one(optimizer: Optimizer) -> None:
    for found in black_box_findings(opacus_implementation(), 1e-4, (optimizer,)):
        assert not found.violated, found.statement
        assert found.plots


@pytest.mark.slow
@pytest.mark.parametrize("scaling", OURS)
def test_our_scalings_pass_for_both_optimizers(scaling: str) -> None:
    for found in black_box_findings(our_implementation(scaling), 1e-4):
        assert not found.violated, found.statement


def test_adam_sees_the_same_faults() -> None:
    assert bound_finding(dp_sgd("no clipping"), ADAM).violated
    broken = per_example_finding(dp_sgd("the mini-batch is clipped"), ADAM, (1, 2, 4, 8, 16, 32, 64))
    assert broken.violated and broken.factor > 30
    sound = per_example_finding(dp_sgd(), ADAM, (1, 2, 4, 8, 16, 32, 64))
    assert not sound.violated, sound.statement


@pytest.mark.slow
def test_adam_sees_noise_without_the_bound() -> None:
    assert calibration_finding(dp_sgd("noise without the bound"), ADAM, 1e-4, models=3, values=5).violated
    assert not calibration_finding(dp_sgd(), ADAM, 1e-4, models=3, values=5).violated


def test_one_examples_effect_grows_with_the_mini_batch_by_its_size() -> None:
    """Paper 002: the privacy guarantee is weaker "by a factor that equals to the batch size"."""
    found = per_example_finding(dp_sgd("the mini-batch is clipped"), SGD, (1, 2, 4, 8, 16, 32, 64))
    assert found.factor == pytest.approx(64, rel=0.02)
    assert found.p_value > 0.1


def test_the_synthesised_batch_has_one_gradient() -> None:
    implementation = dp_sgd("no clipping")
    start = implementation.warmed(SGD, random_data(8))
    x, y = one_example_among_zeros(implementation, start, 12, SGD)
    alone = implementation.train((x[1:], y[1:]), SGD, start)
    assert float((alone.flat() - start.flat()).norm()) < 1e-6
    first = implementation.train((x[:1], y[:1]), SGD, start)
    assert float((first.flat() - start.flat()).norm()) > 1e-2
    again = one_example_among_zeros(implementation, start, 30, SGD)
    assert torch.equal(again[0][0], x[0]) and torch.allclose(again[1][0], y[0])


def test_the_heuristics_of_appendix_b_find_where_clipping_ends_and_noise_begins() -> None:
    implementation = dp_sgd()
    star = choose_bound(implementation, SGD)
    x, y = random_data(16)
    start = implementation.warmed(SGD.but(bound=1e6), (x, y))
    unclipped = implementation.train((x, y), SGD.but(bound=1e6), start).flat()
    at_star = implementation.train((x, y), SGD.but(bound=star), start).flat()
    below = implementation.train((x, y), SGD.but(bound=star / 10), start).flat()
    assert torch.allclose(at_star, unclipped, rtol=1e-5) and not torch.allclose(below, unclipped, rtol=1e-3)
    noise = choose_noise(implementation, SGD, star)
    assert 1e-5 < noise <= 1
    assert choose_noise(dp_sgd("no noise"), SGD, star) == 0.0


def deep(depth: int) -> nn.Module:
    layers = [nn.Linear(8, 8, bias=False) for _ in range(depth)]
    for layer in layers:
        nn.init.eye_(layer.weight)
    return nn.Sequential(*layers)


def test_opacus_and_ours_need_no_root_of_the_depth_and_layers_clipped_apart_do() -> None:
    x = torch.full((1, 8), 8**-0.5)

    def factors(build: object) -> dict[int, float]:
        hyper = SGD.but(bound=0.5, noise_multiplier=1.0)
        found = black_box_depth_finding(lambda d: (build(d), (x, 100 * x)), hyper, 1e-4, (1, 4))  # type: ignore[operator]
        return found.values["factor_by_depth"]

    for build in (
        lambda d: opacus_implementation(lambda: deep(d)),
        lambda d: our_implementation("layerwise", build=lambda: deep(d), allocation="equal"),
    ):
        assert max(factors(build).values()) <= 1
    broken = factors(lambda d: dp_sgd("each layer is clipped to the whole bound", lambda: deep(d)))
    assert broken[4] / broken[1] == pytest.approx(math.sqrt(4), rel=0.15)


def test_a_constant_has_no_slope_and_a_line_has_one() -> None:
    assert slope_p_value([1, 2, 3, 4], [5.0] * 4) == 1.0
    assert slope_p_value([1, 2, 3, 4], [5.0, 6.0, 7.0, 8.01]) < 1e-4
    assert isinstance(dp_sgd(), Implementation) and isinstance(network(), nn.Module)
