"""Factors c_ik: lipdp_lightning/mechanism/scaling.py."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from private_step import Harness, Tied, make_network, make_plan, mlp, random_batch
from torch import Tensor, nn

from lipdp_lightning.layers import ScaledLinear
from lipdp_lightning.mechanism.allocation import NoiseBudget
from lipdp_lightning.mechanism.radii import BatchMax, Radii, Radius, quantile_step
from lipdp_lightning.mechanism.scaling import Joint, Layerwise, Scaling

BUDGET = NoiseBudget(0.8, "global", 20)
NORMS = torch.tensor([0.0, 1e-9, 0.5, 1.0, 2.0, 40.0])


def factors(scaling: Scaling, norms: Tensor) -> Tensor:
    layer = ScaledLinear(3, 2)
    scaling.attach(layer)
    assert layer.gradient_scaler is not None
    result = layer.gradient_scaler(norms)
    assert result is not None
    return result


def test_layerwise_divides_by_the_norm_and_never_by_less_than_the_floor() -> None:
    plain = factors(Layerwise(BUDGET), NORMS)
    assert torch.isfinite(plain).all()
    assert torch.equal(plain[2:], 1 / NORMS[2:])
    floored = factors(Layerwise(BUDGET, floor=0.8), NORMS)
    assert torch.equal(floored, 1 / NORMS.clamp_min(0.8))
    for result in (plain, floored):
        assert (result * NORMS).max() <= 1  # ||c g|| <= l n c


def test_radius_is_the_formula_of_the_table() -> None:
    radius = 0.7
    expected = torch.minimum(torch.ones_like(NORMS), radius / NORMS) / radius
    assert torch.allclose(factors(Radius(BUDGET, Radii({"": radius})), NORMS), expected)
    assert (expected * NORMS).max() <= 1 + 1e-6


@given(
    st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=8),
    st.floats(0, 1e6, width=32),
    st.sampled_from(["layerwise", "radius"]),
)
def test_a_factor_does_not_depend_on_the_other_examples(norms: list[float], newcomer: float, kind: str) -> None:
    scaling = Layerwise(BUDGET, 1e-6) if kind == "layerwise" else Radius(BUDGET, Radii({"": 2.5}))
    alone = factors(scaling, torch.tensor(norms))
    assert torch.equal(factors(scaling, torch.tensor([*norms, newcomer]))[:-1], alone)


def test_the_factor_of_the_batch_maximum_depends_on_the_other_examples() -> None:
    assert not BatchMax.certified and Layerwise.certified
    alone = factors(BatchMax(BUDGET), torch.tensor([1.0, 2.0]))
    assert not torch.equal(factors(BatchMax(BUDGET), torch.tensor([1.0, 2.0, 28.0]))[:-1], alone)
    assert factors(BatchMax(BUDGET), torch.zeros(0)).shape == (0,)


def test_layers_keep_no_scaler_after_detach() -> None:
    network = mlp_private()
    radius = Radius(BUDGET, Radii({"1": 1.0, "3": 1.0, "5": 1.0}))
    for scaling in (Layerwise(BUDGET), radius, BatchMax(BUDGET), Joint(BUDGET)):
        scaling.attach(network)
        assert network[1].gradient_scaler is not None
        scaling.detach(network)
        assert network[1].gradient_scaler is None
    Scaling(BUDGET).attach(network)
    assert network[1].gradient_scaler is None  # worst_case leaves the layers as they are


def mlp_private() -> nn.Module:
    from lipdp_lightning.layers import make_private

    return make_private(mlp())


def joint_harness(network: str, **options: Any) -> Harness:
    built, shape = make_network(network)
    return Harness(built, shape, make_plan(scaling="joint", **options))


def joint_factor(harness: Harness, x: Tensor) -> Tensor:
    """The factor of every example, recorded on one forward pass."""
    harness.mechanism.begin_step(0)
    scaling = harness.mechanism.scaling
    assert isinstance(scaling, Joint)
    harness.module(x)
    factor = scaling.example_factor(len(x), x.device)
    assert factor is not None
    return factor


def expected_joint_factor(harness: Harness, x: Tensor, square_per_use: bool = False) -> Tensor:
    """1 / sqrt(sum_k (sum_u l_u n_iu / tau_k)^2) from the layers' own norms: uses of a group add, then square."""
    norms: dict[str, list[Tensor]] = {}
    modules = dict(harness.module.network.named_modules())
    hooks = [
        module.register_forward_hook(
            lambda layer, args, _, path=path: norms.setdefault(path, []).append(layer.example_norms(args[0]))
        )
        for path, module in modules.items()
        if isinstance(module, ScaledLinear)
    ]
    with torch.no_grad():
        harness.module(x)
    for hook in hooks:
        hook.remove()
    certificate = harness.mechanism.certificate
    margin = harness.mechanism.sensitivities()
    worst = certificate.sensitivities("worst_case")
    scale = math.sqrt(sum(v**2 for v in worst.values()))  # tau of the global allocation
    assert margin["head"] == pytest.approx(scale, rel=1e-3)
    calls: Counter[str] = Counter()
    squares = torch.zeros(len(x), dtype=torch.float64)
    for group in certificate.groups:
        terms = []
        for use in group.uses:
            if use.scalable:
                terms.append(use.cotangent_bound * norms[use.module][calls[use.module]].double())
                calls[use.module] += 1
            else:
                terms.append(torch.full((len(x),), use.cotangent_bound * use.gradient_factor, dtype=torch.float64))
        total = sum(t**2 for t in terms) if square_per_use else sum(terms) ** 2
        squares += total / scale**2
    return squares.rsqrt()


@pytest.mark.parametrize("network", ["tied", "branched"])
def test_joint_factor_adds_the_uses_of_a_group_and_bounds_what_cannot_be_measured(network: str) -> None:
    harness = joint_harness(network)
    x = random_batch(9, harness.input_shape, 5)[0]
    factor = joint_factor(harness, x).double()
    assert torch.allclose(factor, expected_joint_factor(harness, x), rtol=1e-5)
    assert (factor > 1 - 1e-5).all()  # thresholds come from the worst case
    if network == "tied":  # uses not added before they are squared
        assert not torch.allclose(factor, expected_joint_factor(harness, x, square_per_use=True), rtol=1e-3)
    harness.mechanism.close()


def test_uses_of_an_operation_without_its_layer_enter_with_their_worst_case() -> None:
    harness = joint_harness("branched")
    certificate = harness.mechanism.certificate
    (plain,) = [u for g in certificate.groups for u in g.uses if not u.scalable]
    group = certificate.group("plain")
    assert group.layerwise == pytest.approx(plain.cotangent_bound * plain.gradient_factor)
    assert group.sensitivity("radius") == group.layerwise < group.worst_case * (1 + 1e-12)
    # two uses of one layer: their bounds add
    tied = joint_harness("tied").mechanism.certificate.group("inner")
    assert len(tied.uses) == 2
    assert tied.layerwise == pytest.approx(sum(u.cotangent_bound for u in tied.uses))


def recorded(norms: list[list[float]], dtype: torch.dtype) -> Tensor:
    """The factors of three examples: two uses of one group with a constant, one use of another, a third of none."""
    scaling = Joint(BUDGET)
    scaling._constants, scaling._terms = [0.5, 0.0, 2.0], [(0, 0.3), (1, 2.5), (0, 7.0)]
    scaling._expected = ["a", "b", "a"]
    for path, values in zip(scaling._expected, norms, strict=True):
        scaling._used.append(path)
        scaler = scaling.scaler_of(path)
        assert scaler is not None
        scaler(torch.tensor(values, dtype=dtype))
    factor = scaling.example_factor(3, torch.device("cpu"))
    assert factor is not None
    return factor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_joint_factors_are_those_of_the_formula(dtype: torch.dtype) -> None:
    norms = [[1.0, 0.0, math.nan], [4.0, 0.0, 1.0], [2.0, 0.0, 1.0]]
    found = recorded(norms, dtype)
    expected = [1 / math.sqrt((0.5 + 0.3 + 14.0) ** 2 + 10.0**2 + 4.0), 1 / math.sqrt(0.25 + 4.0)]
    assert found[:2].tolist() == pytest.approx(expected, rel=2**-22)
    assert found[2].isnan()  # its row is made zero; a factor by the floor would not be


def test_norms_of_other_rows_than_the_examples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^\D*another number of rows than the batch has examples\D*$"):
        recorded([[1.0] * 3, [1.0] * 3, [1.0]], torch.float32)


def test_joint_factor_is_capped_by_the_floor() -> None:
    harness = joint_harness("mlp", scaling_floor=0.9)
    x = torch.zeros(2, 12)
    capped = joint_factor(harness, x)
    assert torch.allclose(capped, torch.full((2,), 1 / 0.9))
    free = joint_factor(joint_harness("mlp"), x)
    assert (free > 1 / 0.9).all()


def test_joint_records_start_afresh_with_every_micro_batch_and_every_step() -> None:
    harness = joint_harness("tied")
    x = random_batch(4, (12,), 5)[0]
    first = joint_factor(harness, x)
    assert torch.equal(joint_factor(harness, x), first)
    scaling = harness.mechanism.scaling
    harness.module(x)  # a pass that no loss followed
    harness.module(x)
    with pytest.raises(ValueError, match="used the layers"):
        scaling.example_factor(4, x.device)  # would be taken for further uses of the layers
    harness.module(x)
    with pytest.raises(ValueError, match="used the layers"):
        scaling.begin_pass(4)
    scaling.begin(harness.mechanism.numbers())
    harness.module(x)
    factor = scaling.example_factor(4, x.device)
    assert factor is not None and torch.equal(factor, first)


def test_a_frozen_layer_takes_no_part() -> None:
    torch.manual_seed(0)
    network = mlp()
    network[1].weight.requires_grad_(False)
    network[1].bias.requires_grad_(False)
    harness = Harness(network, (12,), make_plan(scaling="joint"))
    assert [g.name for g in harness.mechanism.certificate.groups] == ["3", "5"]
    released = harness.release(random_batch(6, (12,), 5))
    assert set(released) == {"3", "5"} and network[1].weight.grad is None
    harness.mechanism.close()


def test_votes_count_every_example_once_per_use() -> None:
    torch.manual_seed(0)
    plan = make_plan(scaling="radius", radius_quantile=0.5, radius_noise_multiplier=4.0)
    harness = Harness(Tied(), (12,), plan)
    scaling = harness.mechanism.scaling
    assert isinstance(scaling, Radius) and set(scaling.state().values()) == {1.0}
    scaling.load_state({"inner": 1e-6, "head": 1e6})
    harness.accumulate(random_batch(10, (12,), 5))
    votes = dict(zip(harness.mechanism.numbers().votes, scaling.take_votes(torch.device("cpu")).tolist(), strict=True))
    assert votes["inner"] == -10.0  # two uses, each of ten examples above the radius
    assert votes["head"] == 5.0
    # one example moves them by (1, 1/2, 1/2, 1/2)
    assert harness.mechanism.numbers().vote_deviation == pytest.approx(4.0 * math.sqrt(1 + 3 / 4))
    harness.mechanism.close()


def test_votes_of_passes_outside_the_step_are_not_released() -> None:
    torch.manual_seed(0)
    plan = make_plan(scaling="radius", radius_quantile=0.5, radius_noise_multiplier=4.0)
    harness = Harness(mlp(), (12,), plan)
    batch = random_batch(10, (12,), 5)
    harness.module(batch[0])
    harness.release(batch)
    votes = harness.mechanism.votes
    harness.release(batch)
    assert votes is not None and torch.equal(votes, harness.mechanism.votes)
    harness.mechanism.close()


def test_tracked_radius_settles_at_the_quantile() -> None:
    """From either side, on shares without noise: a fraction `quantile` of norms lies below the radius."""
    norms = torch.linspace(0, 10, 1001)
    for start in (0.01, 1000.0):
        radius = start
        for _ in range(300):
            radius = quantile_step(radius, (norms <= radius).float().mean().item(), 0.3)
        assert radius == pytest.approx(3.0, rel=0.05)
    assert quantile_step(1.0, 1e9, 0.5) == quantile_step(1.0, 1.0, 0.5)  # a noisy share is cut to [0, 1]
    assert quantile_step(1.0, -1e9, 0.5) == quantile_step(1.0, 0.0, 0.5)
