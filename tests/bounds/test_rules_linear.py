"""Linear layers and convolutions: slope, output norm and parameter gradient, each against autograd's own."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from rule_checks import SLACK, Forward, bounds_of, jacobian_norm, largest_output, starts
from torch import nn

from lipdp_lightning.bounds import CertificationError, certify
from lipdp_lightning.layers import make_private

RADIUS = 2.0


def certificate_of(model, shape):
    return certify(model.double(), shape, RADIUS, "binary_cross_entropy", compute_dtype=torch.float64)


def gradient_factor(model, x):
    """Largest ||gradient in the trained parameters|| / ||cotangent||, over cotangents, at one example."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    names = list(trained)

    def output(*values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x[None],)).flatten()

    blocks = torch.autograd.functional.jacobian(output, tuple(p.detach() for p in trained.values()))
    rows = torch.cat([b.reshape(b.shape[0], -1) for b in blocks], dim=1)
    return float(torch.linalg.matrix_norm(rows, 2))


def attack(model, shape):
    """(slope, output, gradient factor) found, each over what is certified."""
    certificate = certificate_of(model, shape)
    lipschitz = certificate.nodes[0].cotangent / certificate.loss_lipschitz
    inputs = starts(shape, RADIUS, count=6)
    aligned = strongest_input(model, shape)
    slope = jacobian_norm(model, inputs[4])
    output = max(
        largest_output(model, shape, RADIUS, steps=20),
        *(float(model(s * aligned[None]).detach().norm()) for s in (1, -1)),
    )
    ratios = [slope / lipschitz, output / certificate.node(certificate.output).forward]
    for group in certificate.groups:
        (use,) = group.uses
        ratios.append(max(gradient_factor(model, x) for x in inputs) / use.gradient_factor)
    return ratios


def strongest_input(model, shape):
    rows = torch.autograd.functional.jacobian(lambda z: model(z).flatten(), torch.zeros(1, *shape, dtype=torch.float64))
    return (RADIUS * torch.linalg.svd(rows.reshape(len(rows), -1)).Vh[0]).reshape(shape)


def frozen(layer, *names):
    for name in names:
        getattr(layer, name).requires_grad_(False)
    return layer


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(5, 3), (5,)),
        (lambda: nn.Linear(5, 3, bias=False), (5,)),
        (lambda: nn.Linear(3, 7), (3,)),
        (lambda: nn.Linear(5, 3), (4, 5)),
        (lambda: nn.Linear(5, 3), (2, 3, 5)),
        (lambda: frozen(nn.Linear(5, 3), "weight"), (4, 5)),
        (lambda: frozen(nn.Linear(5, 3), "bias"), (4, 5)),
        (lambda: make_private(nn.Linear(5, 3)), (4, 5)),
    ],
)
def test_linear(make, shape):
    torch.manual_seed(0)
    model = make()
    slope, output, factor = attack(model, shape)
    assert 0.999 <= slope <= SLACK
    assert 0.7 <= output <= SLACK
    assert 0.6 <= factor <= SLACK  # at positions it needs an input of rank one


def test_the_linear_gradient_bound_is_attained():
    torch.manual_seed(0)
    for shape in ((5,), (4, 5)):
        model = nn.Linear(5, 3).double()
        x = torch.zeros(shape, dtype=torch.float64)
        x[..., 0] = RADIUS / math.sqrt(math.prod(shape[:-1]))
        (use,) = certificate_of(model, shape).groups[0].uses
        assert gradient_factor(model, x) >= 0.999 * use.gradient_factor


def test_forgotten_bias_and_positions_would_be_exceeded():
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    x = torch.zeros(4, 5, dtype=torch.float64)
    x[:, 0] = RADIUS / 2
    assert gradient_factor(model, x) > math.sqrt(RADIUS**2 + 1) * 1.1 > RADIUS  # P = 4 counted as 1, or not at all


CONVOLUTIONS = [
    (nn.Conv1d, {"kernel_size": 3}, (2, 8)),
    (nn.Conv1d, {"kernel_size": 4, "stride": 2, "padding": 1, "dilation": 2}, (2, 11)),
    (nn.Conv1d, {"kernel_size": 4, "padding": "same"}, (2, 7)),
    (nn.Conv1d, {"kernel_size": 3, "padding": 2, "padding_mode": "circular"}, (2, 7)),
    (nn.Conv2d, {"kernel_size": 3, "padding": 1}, (2, 5, 6)),
    (nn.Conv2d, {"kernel_size": 3, "stride": 2, "padding": 1}, (2, 6, 5)),
    (nn.Conv2d, {"kernel_size": (2, 3), "stride": (3, 1), "padding": (1, 0)}, (2, 6, 6)),
    (nn.Conv2d, {"kernel_size": 3, "dilation": 2, "stride": 2, "padding": 2}, (2, 7, 7)),
    (nn.Conv2d, {"kernel_size": 2, "padding": "same"}, (2, 5, 5)),
    (nn.Conv2d, {"kernel_size": 3, "padding": 1, "groups": 2}, (2, 5, 5)),
    (nn.Conv2d, {"kernel_size": 3, "padding": 2, "padding_mode": "reflect"}, (2, 5, 5)),
    (nn.Conv2d, {"kernel_size": 3, "padding": 2, "padding_mode": "replicate"}, (2, 5, 5)),
    (nn.Conv2d, {"kernel_size": 1, "bias": False}, (2, 4, 4)),
]


@pytest.mark.filterwarnings("ignore:Using padding=")
@pytest.mark.parametrize(("kind", "options", "shape"), CONVOLUTIONS, ids=str)
def test_convolutions(kind, options, shape):
    torch.manual_seed(0)
    model = kind(2, 4, **options).double()
    slope, output, factor = attack(model, shape)
    assert 0.8 <= slope <= SLACK
    assert 0.5 <= output <= SLACK
    assert 0.3 <= factor <= SLACK
    assert max(attack(make_private(model), shape)) <= SLACK


@pytest.mark.parametrize(("kind", "options", "shape"), CONVOLUTIONS[:4] + CONVOLUTIONS[7:8], ids=str)
def test_without_kappa_the_convolution_bounds_would_be_exceeded(kind, options, shape):
    """The kernel as a matrix is no bound of the operator, and ||x|| is none of the patches."""
    torch.manual_seed(0)
    model = kind(1, 1, **{**options, "bias": False}).double()
    nn.init.ones_(model.weight)
    shape = (1, *shape[1:])
    flat = torch.full(shape, RADIUS / math.sqrt(math.prod(shape)), dtype=torch.float64)
    reshaped = float(torch.linalg.matrix_norm(model.weight.detach().flatten(1), 2))
    assert jacobian_norm(model, flat) > reshaped * 1.05
    (use,) = certificate_of(model, shape).groups[0].uses
    assert RADIUS * 1.05 < gradient_factor(model, flat) <= use.gradient_factor * SLACK


class Functional(nn.Module):
    def __init__(self, function, weight, bias):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias)

    def forward(self, x):
        return self.function(x, self.weight, self.bias)


@pytest.mark.parametrize(
    ("module", "functions", "shape"),
    [
        (nn.Linear(5, 3), [F.linear, lambda x, w, b: F.linear(x, weight=w, bias=b)], (4, 5)),
        (nn.Conv1d(2, 4, 3, 2, 1), [lambda x, w, b: F.conv1d(x, w, b, 2, 1),
        lambda x, w, b: torch.conv1d(x, w, b, stride=2, padding=1)], (2, 8)),
        (nn.Conv2d(2, 4, 3, padding="same", dilation=2), [lambda x, w, b: F.conv2d(x, w, b, padding="same", dilation=2),
            lambda x, w, b: F.conv2d(x, w, bias=b, stride=(1, 1), padding=(2, 2), dilation=2)], (2, 6, 6)),
        (nn.Conv2d(2, 4, 3, groups=2), [lambda x, w, b: F.conv2d(x, w, b, 1, 0, 1, 2)], (2, 6, 6)),
    ],
)  # fmt: skip
def test_functional_forms_certify_like_the_module(module, functions, shape):
    expected = certificate_of(module, shape).groups[0].uses[0]
    for function in functions:
        model = Functional(function, module.weight.detach(), module.bias.detach())
        (group,) = certificate_of(model, shape).groups
        assert set(group.parameters) == {"weight", "bias"}
        assert group.uses[0].gradient_factor == pytest.approx(expected.gradient_factor, rel=1e-12)
        assert group.uses[0].lipschitz == pytest.approx(expected.lipschitz, rel=1e-12)
        assert not group.uses[0].scalable
        x = starts(shape, RADIUS, count=3)
        torch.testing.assert_close(model.double()(x), module.double()(x))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: F.linear(x, x), "examples apart"),
        (lambda m, x: F.linear(x, m.frozen), "broadcasts"),
        (lambda m, x: F.linear(x, torch.ones(3, 4), torch.ones(1)), "broadcasts"),
        (lambda m, x: F.linear(x, torch.ones(3, 4), torch.ones(1, 3)), "broadcasts"),
        (lambda m, x: F.linear(x, 2 * m.frozen[None]), "computes from constants"),
        (lambda m, x: F.bilinear(x, x, torch.ones(2, 4, 4)), "rule"),
        (lambda m, x: F.conv_transpose1d(x[:, None], torch.ones(1, 1, 2, dtype=x.dtype)), "rule"),
    ],
)
def test_refused_forms(function, reason):
    with pytest.raises(CertificationError, match=reason):
        certify(Forward(function).double(), (4,), 1.0, "binary_cross_entropy", compute_dtype=torch.float64)


def test_torch_does_broadcast_a_short_bias():
    """What the refusal is for: its gradient sums all outputs, sqrt(P * outputs) instead of sqrt(P)."""
    model = Functional(F.linear, torch.zeros(3, 5), torch.zeros(1)).double()
    x = torch.zeros(5, dtype=torch.float64)
    model.weight.requires_grad_(False)
    assert gradient_factor(model, x) == pytest.approx(math.sqrt(3))


def test_an_example_that_is_no_image_is_refused():
    with pytest.raises(CertificationError):
        certify(nn.Conv2d(2, 3, 3), (5, 5), 1.0, "binary_cross_entropy")


def test_a_weight_that_is_computed_is_refused():
    """weight_norm and spectral_norm train other parameters than the one that the rule would bound."""
    for wrap in (nn.utils.parametrizations.weight_norm, nn.utils.weight_norm, nn.utils.parametrizations.spectral_norm):
        with pytest.raises(CertificationError):
            certify(nn.Sequential(wrap(nn.Linear(4, 3))), (4,), 1.0, "cross_entropy")


def test_a_layer_used_twice_adds_its_uses():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) + self.layer(x)

    model = Twice().double()
    (group,) = certificate_of(model, (4,)).groups
    assert len(group.uses) == 2
    x = starts((4,), RADIUS)[5]
    attacked = gradient_factor(model, x)
    total = sum(u.gradient_factor for u in group.uses)
    assert math.hypot(*(u.gradient_factor for u in group.uses)) * 1.01 < attacked <= total * SLACK


def test_under_bfloat16_only_layers_that_sum_in_float32_are_certified():
    options = {"input_shape": (4,), "input_bound": 1.0, "loss": "cross_entropy", "compute_dtype": torch.bfloat16}
    certify(make_private(nn.Sequential(nn.Linear(4, 3))), **options)
    for model in (nn.Sequential(nn.Linear(4, 3)), Functional(F.linear, torch.zeros(3, 4), torch.zeros(3))):
        with pytest.raises(CertificationError, match="summed over the batch in bfloat16"):
            certify(model, **options)
    with pytest.raises(CertificationError, match="trained in bfloat16"):
        certify(make_private(nn.Sequential(nn.Linear(4, 3))).bfloat16(), **options)
    assert bounds_of(nn.Linear(4, 3).requires_grad_(False), (4,))[0] > 0
