"""Rows of the activation table: constants never exceeded, attained where they are suprema, output norms hold."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from rule_checks import SLACK, Forward, bounds_of, jacobian_norm, largest_output, starts, steepest
from torch import nn

from lipdp_lightning.bounds import CertificationError, certify
from lipdp_lightning.layers import GroupSort, Householder, MaxMin, TemperedSigmoid

ELEMENTWISE = {
    "relu": (nn.ReLU(), 1.0),
    "relu6": (nn.ReLU6(), 1.0),
    "leaky": (nn.LeakyReLU(0.2), 1.0),
    "leaky negative": (nn.LeakyReLU(-0.7), 1.0),
    "leaky steep": (nn.LeakyReLU(-2.5), 2.5),
    "tanh": (nn.Tanh(), 1.0),
    "abs": (Forward(lambda m, x: x.abs()), 1.0),
    "elu": (nn.ELU(0.5), 1.0),
    "elu steep": (nn.ELU(2.0), 2.0),
    "celu": (nn.CELU(2.0), 1.0),
    "selu": (nn.SELU(), 1.758100),
    "gelu": (nn.GELU(), 1.128905),
    "gelu tanh": (nn.GELU("tanh"), 1.128994),
    "silu": (nn.SiLU(), 1.099840),
    "mish": (nn.Mish(), 1.088499),
    "hardswish": (nn.Hardswish(), 1.5),
    "softplus": (nn.Softplus(), 1.0),
    "softplus sharp": (nn.Softplus(3.0), 1.0),
    "softplus flat": (nn.Softplus(0.25), 1.0),
    "logsigmoid": (nn.LogSigmoid(), 1.0),
    "softsign": (nn.Softsign(), 1.0),
    "tanhshrink": (nn.Tanhshrink(), 1.0),
    "softshrink": (nn.Softshrink(0.3), 1.0),
    "hardtanh": (nn.Hardtanh(-0.5, 2.0), 1.0),
    "hardtanh off zero": (nn.Hardtanh(0.5, 2.0), 1.0),
    "sigmoid": (nn.Sigmoid(), 0.25),
    "hardsigmoid": (nn.Hardsigmoid(), 0.1666667),
    "tempered": (TemperedSigmoid(1.58, 3.0, 0.71), 1.58 * 3.0 / 4),
    "tempered negative": (TemperedSigmoid(-2.0, 0.5, 1.0), 0.25),
}


def largest_slope(model: nn.Module) -> float:
    # dense, wide enough for the flattest, with points right beside the kinks
    x = torch.cat([torch.linspace(-60, 60, 240_001), torch.linspace(-6, 6, 240_001) + 1e-7])
    x = x.double().reshape(-1, 1).requires_grad_(True)
    (slope,) = torch.autograd.grad(model.double()(x).sum(), x)
    return float(slope.abs().max())


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_slope_is_attained_and_never_exceeded(name):
    model, constant = ELEMENTWISE[name]
    certified, _ = bounds_of(model, (3,))
    assert certified == pytest.approx(constant, rel=1e-12)
    assert 0.99 * certified <= largest_slope(model) <= certified * SLACK


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("radius", [0.05, 1.0, 4.0, 40.0])
def test_output_norm(name, radius):
    model, _ = ELEMENTWISE[name]
    _, norm = bounds_of(model, (5,), radius)
    assert largest_output(model, (5,), radius) <= norm * SLACK


@pytest.mark.parametrize("name", ["softplus", "sigmoid", "hardtanh off zero", "relu6", "gelu", "tempered"])
def test_output_norm_is_not_loose_everywhere(name):
    model, _ = ELEMENTWISE[name]
    ratios = [largest_output(model, (2,), r) / bounds_of(model, (2,), r)[1] for r in (0.01, 3.0, 300.0)]
    assert max(ratios) >= 0.95


@pytest.mark.parametrize(
    ("name", "believed"),
    [("gelu", 1.0), ("gelu tanh", 1.128905), ("silu", 1.0), ("mish", 1.0), ("hardswish", 1.0), ("selu", 1.0507),
     ("elu steep", 1.0), ("leaky steep", 1.0)],
)  # fmt: skip
def test_common_beliefs_about_slopes_are_exceeded(name, believed):
    assert largest_slope(ELEMENTWISE[name][0]) > believed * (1 + 1e-6)


def test_lipschitz_times_input_is_no_output_bound_for_maps_that_move_zero():
    """The recursion X' = L X: sigmoid(0) = 1/2, softplus(0) = ln 2."""
    for name in ("sigmoid", "softplus", "hardtanh off zero", "hardsigmoid", "logsigmoid"):
        model, constant = ELEMENTWISE[name]
        assert largest_output(model, (5,), 0.05) > constant * 0.05 * 2


def test_softplus_of_a_flat_beta_needs_ln2_over_beta():
    assert largest_output(nn.Softplus(0.25), (5,), 0.05) > 0.05 + math.sqrt(5) * math.log(2)


@pytest.mark.parametrize("layer", [MaxMin(), GroupSort(3), GroupSort(6), Householder(), Householder(0.4)])
@pytest.mark.parametrize("shape", [(6,), (6, 4)])
def test_sorting_layers_are_isometries(layer, shape):
    lipschitz, norm = bounds_of(layer, shape, 2.0)
    assert (lipschitz, norm) == (1.0, 2.0)
    for x in starts(shape, 2.0)[1:]:
        assert jacobian_norm(layer, x) == pytest.approx(1.0, abs=1e-9)
        assert float(layer(x[None]).norm()) == pytest.approx(2.0, rel=1e-9)
    assert steepest(layer, shape) <= SLACK


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(CertificationError, match="fails on an input of shape"):
        certify(MaxMin(), (5,), 1.0, "binary_cross_entropy")


@pytest.mark.parametrize("layer", [nn.Softmax(1), nn.Softmax(-1), Forward(lambda m, x: F.softmax(x, dim=1))])
def test_softmax(layer):
    lipschitz, norm = bounds_of(layer, (4,))
    assert (lipschitz, norm) == (0.5, 1.0)
    assert 0.99 * 0.5 <= steepest(layer, (4,), radius=20.0, steps=400) <= 0.5 * SLACK
    assert 0.99 <= largest_output(layer, (4,), 50.0) <= norm * SLACK


def test_softmax_at_positions_has_one_distribution_each():
    layer = nn.Softmax(1)
    lipschitz, norm = bounds_of(layer, (3, 5), 200.0)
    assert (lipschitz, norm) == (0.5, pytest.approx(math.sqrt(5)))
    assert 0.95 * norm <= largest_output(layer, (3, 5), 200.0) <= norm * SLACK


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("dim", [0, None, -2])
def test_softmax_over_the_batch_is_refused(dim):
    with pytest.raises(CertificationError, match=r"batch|dim"):
        certify(nn.Softmax(dim), (4,), 1.0, "binary_cross_entropy")


@pytest.mark.parametrize(("p", "scale"), [(0.0, 1.0), (0.5, 2.0), (0.9, 10.0), (1.0, 1.0)])
def test_dropout(p, scale):
    assert bounds_of(nn.Dropout(p), (4,), 3.0) == (pytest.approx(scale), pytest.approx(3 * scale))
    torch.manual_seed(0)
    dropped = nn.Dropout(p).train()(torch.eye(4, dtype=torch.float64).repeat(50, 1) * 3)
    assert float(dropped.norm(dim=1).max()) <= 3 * scale * SLACK


FUNCTIONS = {
    "relu": [F.relu, torch.relu, lambda x: x.relu(), lambda x: (x * 1.0).relu_(),
    lambda x: F.relu(x * 1.0, inplace=True),
             lambda x: F.relu_(x * 1.0), lambda x: torch.relu_(x * 1.0)],
    "relu6": [F.relu6], "tanh": [torch.tanh, F.tanh, lambda x: x.tanh()],
    "leaky": [lambda x: F.leaky_relu(x, 0.2), lambda x: F.leaky_relu(x, negative_slope=0.2)],
    "abs": [torch.abs, abs, lambda x: x.abs(), torch.absolute],
    "elu": [lambda x: F.elu(x, 0.5), lambda x: F.elu(x, alpha=0.5)],
    "celu": [lambda x: F.celu(x, 2.0), lambda x: torch.celu(x, 2.0)], "selu": [F.selu, torch.selu],
    "gelu": [F.gelu], "gelu tanh": [lambda x: F.gelu(x, approximate="tanh")], "silu": [F.silu], "mish": [F.mish],
    "hardswish": [F.hardswish], "softplus sharp": [lambda x: F.softplus(x, 3.0), lambda x: F.softplus(x, beta=3.0)],
    "logsigmoid": [F.logsigmoid], "softsign": [F.softsign], "tanhshrink": [F.tanhshrink],
    "softshrink": [lambda x: F.softshrink(x, 0.3)], "sigmoid": [torch.sigmoid, F.sigmoid, lambda x: x.sigmoid()],
    "hardtanh": [lambda x: F.hardtanh(x, -0.5, 2.0), lambda x: torch.clamp(x, -0.5, 2.0), lambda x: x.clip(-0.5, 2.0),
                 lambda x: x.clamp(min=-0.5, max=2.0), lambda x: x.clamp_min(-0.5).clamp_max(2.0)],
    "hardsigmoid": [F.hardsigmoid],
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functional_forms_certify_like_the_module(name):
    expected = bounds_of(ELEMENTWISE[name][0], (3, 2), 1.5)
    for function in FUNCTIONS[name]:
        lipschitz, norm = bounds_of(Forward(lambda m, x, function=function: function(x)), (3, 2), 1.5)
        assert lipschitz == expected[0]
        assert norm == pytest.approx(expected[1], rel=0.2)  # two clamps in a row bound the output less tightly
        x = starts((3, 2), 1.5)
        torch.testing.assert_close(function(x), ELEMENTWISE[name][0].double()(x))


@pytest.mark.parametrize(
    "function",
    [lambda x: x.clamp(min=x), lambda x: torch.clamp(x, max=x), lambda x: F.softplus(x, beta=-1.0),
     lambda x: F.celu(x, -1.0), lambda x: F.softmax(x, 0)],
)  # fmt: skip
def test_arguments_without_a_bound_are_refused(function):
    with pytest.raises(CertificationError):
        certify(Forward(lambda m, x: function(x)).double(), (4,), 1.0, "binary_cross_entropy")
