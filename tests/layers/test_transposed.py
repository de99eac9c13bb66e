"""Transposed convolutions: norms, gradients and their exact norms against torch's own, and against brute force."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import fit, make_module, make_plan
from torch import Tensor, nn

from lipdp_lightning.audit import attack
from lipdp_lightning.bounds import certify
from lipdp_lightning.layers import ScaledConvTranspose1d, ScaledConvTranspose2d, make_private
from lipdp_lightning.layers.contribution import Contribution
from lipdp_lightning.layers.scaled import hands_over

CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "stride": (nn.ConvTranspose2d(3, 4, 3, stride=2), (3, 4, 5)),
    "upsampling": (nn.ConvTranspose2d(2, 3, 2, stride=2), (2, 4, 4)),
    "all options": (nn.ConvTranspose2d(4, 6, 3, 2, padding=1, output_padding=1, groups=2, dilation=2), (4, 4, 3)),
    "padding": (nn.ConvTranspose2d(2, 2, 3, padding=2), (2, 6, 6)),
    "one axis": (nn.ConvTranspose1d(2, 3, 4, stride=3, padding=1, output_padding=2), (2, 6)),
    "no bias": (nn.ConvTranspose2d(3, 4, 3, stride=2, bias=False), (3, 4, 5)),
}


def inputs(shape: tuple[int, ...], rows: int = 5) -> Tensor:
    return torch.randn((rows, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def brute_norm(layer: Any, shape: tuple[int, ...]) -> float:
    """Returns the largest singular value of the layer's matrix."""
    count = int(torch.tensor(shape).prod())
    basis = torch.eye(count, dtype=torch.float64).reshape(count, *shape)
    columns = (layer(basis) - layer(torch.zeros_like(basis))).detach()
    return float(torch.linalg.matrix_norm(columns.flatten(1), 2))


@pytest.mark.parametrize("name", CASES)
def test_the_norm_is_that_of_the_matrix_and_no_attack_exceeds_the_certificate(name: str) -> None:
    torch.manual_seed(0)
    layer, shape = CASES[name]
    network = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(3)).double()
    network(inputs(shape))
    certificate = certify(network, shape, 2.0, "cross_entropy")
    exact = brute_norm(layer, shape)
    (found,) = certificate.node("_0").lipschitz
    assert exact <= found * (1 + 1e-9) <= 1.5 * exact
    report = attack(network, shape, 2.0, "cross_entropy", restarts=4, steps=8)
    assert not report.violations(), report.worst


@pytest.mark.parametrize("name", CASES)
def test_a_private_layer_computes_what_torch_does_and_weighs_each_example(name: str) -> None:
    layer, shape = CASES[name]
    layer = layer.double()
    private: Any = make_private(nn.Sequential(layer))[0]
    assert isinstance(private, ScaledConvTranspose1d | ScaledConvTranspose2d)
    x = inputs(shape).requires_grad_()
    y = private(x)
    assert torch.equal(y, layer(x))
    d = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    factors = torch.tensor([0.0, 1.0, 0.5, 2.0, 0.1], dtype=torch.float64)
    trained = [p for p in (layer.weight, layer.bias) if p is not None]
    weighed = d * factors.reshape(-1, *(1,) * (d.dim() - 1))
    expected = torch.autograd.grad(layer(x), trained, weighed)
    (to_input,) = torch.autograd.grad(layer(x), x, d)
    private.report_to(scaler=lambda norms: factors)
    found = torch.autograd.grad(private(x), [x, *trained], d)
    torch.testing.assert_close(found, (to_input, *expected))
    private.report_to()
    with torch.no_grad():
        norms = private.example_norms(x)
    for i in range(len(x)):
        own = torch.autograd.grad(layer(x[i : i + 1]), trained, d[i : i + 1])
        size = float(sum(g.square().sum() for g in own)) ** 0.5
        assert size <= float(d[i].norm()) * float(norms[i]) * (1 + 1e-9)


@pytest.mark.parametrize("name", CASES)
def test_exact_norms_are_those_of_each_examples_gradient(name: str) -> None:
    layer, shape = CASES[name]
    layer = layer.double()
    if layer.bias is not None:
        assert not hands_over(make_private(nn.Sequential(layer))[0])  # type: ignore[arg-type]
        layer.bias.requires_grad_(False)
    private: Any = make_private(nn.Sequential(layer))[0]
    assert hands_over(private)
    kept: list[Contribution] = []
    private.report_to(keeper=kept.append)
    x = inputs(shape)
    y = private(x)
    d = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y.backward(d)
    private.report_to()
    (contribution,) = kept
    own = [torch.autograd.grad(layer(x[i : i + 1]), layer.weight, d[i : i + 1])[0] for i in range(len(x))]
    exact = torch.stack([g.norm() for g in own])
    assert bool((contribution.norms() >= exact).all()) and bool((contribution.norms() <= 1.01 * exact).all())
    total, bias = contribution.gradients(torch.ones(len(x), dtype=torch.float64))
    torch.testing.assert_close(total, torch.stack(own).sum(0))
    assert bias is None
    if layer.bias is not None:
        layer.bias.requires_grad_(True)


def test_an_output_padding_that_adds_outputs_is_refused() -> None:
    network = nn.Sequential(nn.ConvTranspose2d(2, 2, 3, stride=1, dilation=2, output_padding=1), nn.Flatten())
    with pytest.raises(ValueError, match=r"output_padding.*not below its stride"):
        certify(network, (2, 5, 5), 1.0, "cross_entropy")


@pytest.mark.parametrize("scaling", ["worst_case", "joint", "exact"])
def test_a_network_trains_under_every_scaling_that_can_measure_it(scaling: str) -> None:
    def network(bias: bool) -> nn.Module:
        torch.manual_seed(0)
        up = nn.ConvTranspose1d(2, 3, 2, stride=2, bias=bias)
        return nn.Sequential(nn.Unflatten(1, (2, 3)), up, nn.ReLU(), nn.Flatten(), nn.Linear(18, 3))

    options = {"radius": 0.5} if scaling == "exact" else {}
    plan = make_plan(scaling=scaling, noise_multiplier=0.0, steps=2, max_norm=None, **options)
    before = network(False).state_dict()["1.weight"]
    module, trainer = fit(plan, module=make_module(network=network(False)))
    assert trainer.global_step == 2 and not torch.equal(module.network.state_dict()["1.weight"], before)
    if scaling == "exact":
        with pytest.raises(ValueError, match=r"ScaledConvTranspose1d.*HINT: scaling 'joint'"):
            fit(plan, module=make_module(network=network(True)))
    else:
        fit(plan, module=make_module(network=network(True)))
