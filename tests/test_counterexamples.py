"""Counter-examples of docs/guarantee.md that no other file tests: each shows what a plausible variant would cost."""

from __future__ import annotations

import math

import pytest
import torch
from private_step import Harness, Noiseless, mahalanobis, make_plan, mlp, random_batch, with_example
from scipy import stats
from torch import Tensor, nn

from lipdp_lightning.accounting.accountants import epsilon_of
from lipdp_lightning.accounting.events import LedgerEntry
from lipdp_lightning.mechanism.noise import StepNoise
from lipdp_lightning.mechanism.step import Mechanism
from lipdp_lightning.privacy.keys import derive_key

REFERENCE = {"noise_multiplier": 1.1, "steps": 14_062, "delta": 1e-5}
RATE = 256 / 60_000


def epsilon(noise_multiplier: float) -> float:
    entry = LedgerEntry("subsampled_gaussian", noise_multiplier, RATE, 14_062)
    return epsilon_of("pld", [entry], 1e-5).epsilon


def test_noise_of_one_multiplier_on_each_of_k_layers_is_not_one_mechanism() -> None:
    """sigma Delta_k on each of K layers releases K / sigma^2: 2.4 is claimed, 14.7 and 58 are spent."""
    assert epsilon(1.1) == pytest.approx(2.38, abs=0.02)
    assert epsilon(1.1 / math.sqrt(4)) == pytest.approx(14.7, abs=0.2)
    assert epsilon(1.1 / math.sqrt(8)) == pytest.approx(58, abs=1)
    torch.manual_seed(0)
    harness = Harness(mlp(), (12,), make_plan(allocation="equal", scaling="layerwise"))
    deltas, deviations = harness.mechanism.sensitivities(), harness.mechanism.deviations()
    for name, delta in deltas.items():
        assert deviations[name] == pytest.approx(math.sqrt(3) * harness.plan.noise_multiplier * delta)


def test_a_normal_that_ends_at_5_77_costs_more_than_the_delta() -> None:
    """A 24-bit uniform makes normals up to 5.768. A released coordinate beyond that tells that the example is in.

    Over the reference run one coordinate alone costs a delta of 3.5e-5, where 1e-5 was promised.
    """
    end = math.sqrt(-2 * math.log(2.0**-24))
    assert end == pytest.approx(5.768, abs=1e-3)
    assert torch.randn(2_000_000, generator=torch.Generator().manual_seed(0)).abs().max() < end
    shift = 1 / REFERENCE["noise_multiplier"]
    seen = RATE * (stats.norm.sf(end - shift) - stats.norm.sf(end))
    cost = 1 - (1 - seen) ** REFERENCE["steps"]
    assert cost == pytest.approx(3.5e-5, rel=0.03) and cost > REFERENCE["delta"]
    reach = math.sqrt(-2 * math.log(2.0**-63))  # of the normals in use
    assert REFERENCE["steps"] * stats.norm.sf(reach - shift) < 1e-12


def test_seeds_of_32_bits_repeat_noise_within_a_run() -> None:
    """14,000 steps of 10 groups: nine runs in ten draw some noise twice."""
    draws = 140_000
    assert 1 - math.exp(-(draws**2) / 2**33) == pytest.approx(0.9, abs=0.005)
    keys = [derive_key(bytes(range(16)), "noise", step, 0) for step in range(draws)]
    assert len({key[:4] for key in keys}) < draws
    assert len(set(keys)) == draws


def test_division_by_the_drawn_sample_tells_its_size() -> None:
    """(sum + noise) / |V|: whether one example more was drawn shows in the scale of thousands of coordinates."""

    class DividesByTheDrawn(Mechanism):
        def divisor(self) -> float:
            return float(max(1, self._drawn))

    def scale(kind: type[Mechanism], size: int) -> float:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Flatten(), nn.Linear(400, 50))
        plan = make_plan(scaling="layerwise", noise_multiplier=50.0)
        harness = Harness(network, (400,), plan, kind=kind, secret=size.to_bytes(16, "big"))
        released = harness.release(random_batch(size, (400,), 5))
        harness.mechanism.close()
        return released["1"].std().item()

    assert scale(Mechanism, 4) == pytest.approx(scale(Mechanism, 5), rel=0.03)
    # the factor 5/4 is 35 standard errors of the scale away from 1
    assert scale(DividesByTheDrawn, 4) / scale(DividesByTheDrawn, 5) == pytest.approx(1.25, rel=0.03)


def test_a_group_behind_a_zero_layer_is_counted_by_a_public_rule() -> None:
    """K counts the groups whose bound is not zero, a function of the weights. Here it is 1, then 3."""
    torch.manual_seed(0)
    network = mlp()
    nn.init.zeros_(network[5].weight)
    harness = Harness(network, (12,), make_plan(allocation="equal", scaling="layerwise"))
    assert [d > 0 for d in harness.mechanism.deviations().values()] == [False, False, True]
    with torch.no_grad():
        network[5].weight.fill_(0.01)
    harness.mechanism.begin_step(0)
    deltas, deviations = harness.mechanism.sensitivities(), harness.mechanism.deviations()
    assert sum((deltas[n] / deviations[n]) ** 2 for n in deltas) == pytest.approx(1 / 0.8**2)
    harness.mechanism.close()


def shift_in_bounds(images: Tensor, labels: Tensor) -> float:
    """How far an all-white image moves the sum that thesis Algorithm 8 releases, in its claimed bounds."""
    size = len(images)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    plan = make_plan(
        dataset_size=60_000, expected_batch_size=size, scaling="batch_max", allow_noncertified=True, loss_clip=None
    )
    harness = Harness(network, (784,), plan, input_bound=28.0)
    batch = (images, labels, torch.arange(size))
    moved = mahalanobis(
        harness.release(with_example(batch, torch.ones(784), torch.tensor(0))),
        harness.release(batch),
        harness.mechanism.deviations(),
    )
    harness.mechanism.close()
    return math.sqrt(moved) * plan.noise_multiplier


def test_one_white_image_in_a_batch_of_one_class_moves_the_sum_by_a_hundred_bounds() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(4096, 784, generator=generator) * (torch.rand(4096, 784, generator=generator) < 0.05)
    mixed = torch.randint(10, (4096,), generator=generator)
    assert shift_in_bounds(images[:256], mixed[:256]) > 2
    assert shift_in_bounds(images[:256], torch.full((256,), 3)) > 30
    assert shift_in_bounds(images, torch.full((4096,), 3)) > 500


def test_a_sum_held_in_bfloat16_moves_by_more_than_a_bound() -> None:
    """Aligned gradients add up to a number whose last bit is larger than one gradient."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.nn.functional.normalize(torch.rand(500, generator=generator), dim=0)

    def shift(dtype: torch.dtype) -> float:
        total, worst = torch.zeros(500, dtype=dtype), 0.0
        for _ in range(300):
            before = total
            total = (before.to(dtype) + gradient.to(dtype)).to(dtype)
            worst = max(worst, (total.double() - before.double()).norm().item())
        return worst

    assert shift(torch.bfloat16) > 1.05
    assert shift(torch.float32) < 1 + 1e-5


class AtAnotherScale(Mechanism):
    """Keys its noise by the weights alone, not by the bounds that scale it."""

    def _noise_of(self, step: int) -> StepNoise:
        return StepNoise.of(self._secret, step, self.place, bytes(32), grid=False)


def wide() -> nn.Module:
    """With a layer whose norm is too costly to be taken anew at every step, so that its bound lags."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 5)
    )  # fmt: skip


def test_one_draw_at_two_scales_reveals_the_sum() -> None:
    """Bounds that lag behind the weights differ after a resume. The same draw at both scales is solved for the sum."""

    def released(kind: type[Mechanism], lag: float) -> tuple[Tensor, dict[str, float]]:
        network = wide()
        with torch.no_grad():
            network[3].weight.mul_(1 / lag)
        harness = Harness(network, (12,), make_plan(max_norm=None, scaling="worst_case"), kind=kind, grid=False)
        harness.mechanism.begin_step(0)
        with torch.no_grad():
            network[3].weight.mul_(lag)
        values = harness.release(random_batch(20, (12,), 5), 1)
        deviations = harness.mechanism.deviations()
        harness.mechanism.close()
        return torch.cat(list(values.values())), deviations

    exact = Harness(wide(), (12,), make_plan(max_norm=None, scaling="worst_case"), kind=Noiseless)
    true_sum = torch.cat(list(exact.release(random_batch(20, (12,), 5)).values())) / 20

    def error_of_the_solution(kind: type[Mechanism]) -> float:
        (first, one), (second, two) = released(kind, 1.0), released(kind, 1.03125)
        a, b = one["1"], two["1"]  # allocation global: one deviation for all
        assert a != b
        return ((b * first - a * second) / (b - a) - true_sum).abs().max().item()

    assert error_of_the_solution(AtAnotherScale) < 1e-3
    assert error_of_the_solution(Mechanism) > 1
