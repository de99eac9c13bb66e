"""Scaled layers: torch's own in value and gradient, and sum_i c_i g_i when a scaler is attached."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lipdp_lightning.layers import ScaledConv1d, ScaledConv2d, ScaledLinear

TORCH = {ScaledLinear: nn.Linear, ScaledConv1d: nn.Conv1d, ScaledConv2d: nn.Conv2d}
pytestmark = pytest.mark.filterwarnings("ignore:Using padding=")

CASES = [
    (ScaledLinear, (5, 3), {}, (5,)),
    (ScaledLinear, (3, 7), {"bias": False}, (3,)),
    (ScaledLinear, (5, 3), {}, (4, 5)),
    (ScaledLinear, (3, 6), {}, (2, 4, 3)),
    (ScaledConv1d, (2, 3, 3), {}, (2, 8)),
    (ScaledConv1d, (4, 6, 2), {"stride": 3, "padding": 1, "groups": 2}, (4, 9)),
    (ScaledConv1d, (2, 3, 4), {"padding": "same", "dilation": 1}, (2, 8)),
    (ScaledConv1d, (2, 3, 3), {"padding": "valid", "dilation": 3}, (2, 11)),
    (ScaledConv1d, (2, 3, 4), {"padding": "same", "padding_mode": "circular"}, (2, 7)),
    (ScaledConv2d, (2, 3, 3), {"padding": 1}, (2, 5, 6)),
    (ScaledConv2d, (2, 3, (2, 3)), {"stride": (3, 1), "padding": (0, 2), "dilation": (1, 2)}, (2, 7, 5)),
    (ScaledConv2d, (2, 4, 2), {"padding": "same", "bias": False}, (2, 4, 5)),
    (ScaledConv2d, (4, 8, 3), {"stride": 2, "padding": 1, "groups": 4}, (4, 6, 5)),
    (ScaledConv2d, (4, 2, (4, 2)), {"padding": "same", "groups": 2, "padding_mode": "reflect"}, (4, 5, 5)),
    (ScaledConv2d, (2, 3, 3), {"padding": (2, 1), "padding_mode": "circular", "stride": 2}, (2, 5, 6)),
    (ScaledConv2d, (2, 3, 3), {"padding": 2, "padding_mode": "reflect", "dilation": 2}, (2, 5, 5)),
    (ScaledConv2d, (2, 3, 3), {"padding": 3, "padding_mode": "replicate", "stride": 2}, (2, 4, 5)),
    (ScaledConv2d, (3, 40, 1), {}, (3, 3, 3)),
]


def build(case, dtype=torch.float64):
    kind, args, options, shape = case
    torch.manual_seed(0)
    layer = kind(*args, **options).to(dtype)
    plain = TORCH[kind](*args, **options).to(dtype)
    plain.load_state_dict(layer.state_dict())
    return layer, plain, torch.randn(6, *shape, dtype=dtype, requires_grad=True)


def gradients(layer, x, cotangent):
    layer.zero_grad()
    (to_input,) = torch.autograd.grad(layer(x), x, cotangent, retain_graph=False)
    layer.zero_grad()
    layer(x).backward(cotangent)
    return to_input, {n: None if p.grad is None else p.grad.clone() for n, p in layer.named_parameters()}


def per_example(plain, x, cotangent):
    return [gradients(plain, x[i : i + 1].detach().requires_grad_(), cotangent[i : i + 1])[1] for i in range(len(x))]


def patches(plain, x, shape):
    """The matrix of patches of one example, (positions, entries), per group, straight from torch's unfold."""
    if isinstance(plain, nn.Linear):
        return x.reshape(1, -1, shape[-1])
    sides = list(plain._reversed_padding_repeated_twice)
    mode = "constant" if plain.padding_mode == "zeros" else plain.padding_mode
    padded = F.pad(x[None], sides, mode=mode)
    if padded.dim() == 3:
        padded = padded.unsqueeze(2)
    kernel, stride, dilation = [
        (1,) * (2 - len(t)) + tuple(t) for t in (plain.kernel_size, plain.stride, plain.dilation)
    ]
    columns = F.unfold(padded, kernel, dilation, 0, stride)[0]
    return columns.reshape(plain.groups, -1, columns.shape[-1]).transpose(1, 2)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("observed", [False, True])
def test_without_a_factor_value_and_gradients_are_torchs(case, observed):
    layer, plain, x = build(case)
    if observed:
        layer.gradient_scaler = lambda norms: None
    torch.testing.assert_close(layer(x), plain(x), rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(layer(x))
    ours, theirs = gradients(layer, x, cotangent), gradients(plain, x, cotangent)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradient_is_the_sum_of_scaled_examples(case):
    layer, plain, x = build(case)
    factor = torch.tensor([0.5, 0.0, 3.0, 1.0, 1e-3, 7.0], dtype=torch.float64)
    layer.gradient_scaler = lambda norms: factor
    cotangent = torch.randn_like(plain(x))
    to_input, scaled = gradients(layer, x, cotangent)
    alone = per_example(plain, x, cotangent)
    for name, gradient in scaled.items():
        expected = sum(c * g[name] for c, g in zip(factor, alone, strict=True))
        torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-11)
        assert not torch.allclose(gradient, sum(g[name] for g in alone))
    torch.testing.assert_close(to_input, gradients(plain, x, cotangent)[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("frozen", ["weight", "bias", None])
def test_norms_are_those_of_the_patches_and_bound_every_gradient(case, frozen):
    layer, plain, x = build(case)
    if frozen == "bias" and layer.bias is None:
        frozen = None
    for module in (layer, plain):
        if frozen:
            getattr(module, frozen).requires_grad_(False)
    norms = layer.example_norms(x).detach()
    cotangent = torch.randn_like(plain(x))
    for i, gradient in enumerate(per_example(plain, x, cotangent) if any(layer._trains) else []):
        rows = patches(plain, x[i].detach(), case[3])
        weights = float(rows.square().sum((1, 2)).max()) if frozen != "weight" else 0.0
        positions = rows.shape[1] if plain.bias is not None and frozen != "bias" else 0
        assert float(norms[i]) == pytest.approx(math.sqrt(weights + positions), rel=1e-12)
        size = math.hypot(*(float(g.norm()) for g in gradient.values() if g is not None))
        assert size <= float(cotangent[i].norm()) * float(norms[i]) * (1 + 1e-12)
    layer.gradient_scaler = lambda n: 1 / n.clamp_min(1e-12)
    scaled = gradients(layer, x, cotangent)[1] if any(layer._trains) else {}
    assert all((g is None) == (name == frozen) for name, g in scaled.items())


def test_a_fully_frozen_layer_is_left_alone():
    layer = ScaledLinear(3, 2).requires_grad_(False)
    layer.gradient_scaler = lambda norms: pytest.fail("nothing is trained")
    x = torch.randn(4, 3, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4], CASES[7], CASES[14], CASES[16], CASES[17]], ids=str)
def test_the_bound_of_the_norm_is_attained(case):
    """An example of equal patches and one channel's cotangent; zero padding would make those at the border differ."""
    layer, plain, _ = build(case)
    x = torch.ones(1, *case[3], dtype=torch.float64)
    with torch.no_grad():
        cotangent = torch.zeros_like(plain(x))
        cotangent[:, 0] = 1.0
        if isinstance(plain, nn.Linear):
            cotangent.zero_()[..., 0] = 1.0
    (gradient,) = per_example(plain, x, cotangent)
    size = math.hypot(*(float(g.norm()) for g in gradient.values()))
    ratio = size / float(cotangent.norm()) / float(layer.example_norms(x))
    assert 0.95 <= ratio <= 1 + 1e-12


def test_a_norm_without_bias_patches_or_groups_would_be_exceeded():
    _, plain, _ = build(CASES[9])
    x = torch.ones(1, *CASES[9][3], dtype=torch.float64)
    cotangent = torch.ones_like(plain(x)).detach()
    cotangent[:, 1:] = 0
    (gradient,) = per_example(plain, x, cotangent)
    ratio = math.hypot(*(float(g.norm()) for g in gradient.values())) / float(cotangent.norm())
    assert ratio > math.sqrt(float(x.square().sum()) + 1) * 1.5


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_empty_batches(case, scaled):
    layer, plain, x = build(case)
    if scaled:
        layer.gradient_scaler = lambda norms: 1 / norms
    empty = x[:0].detach().requires_grad_()
    out = layer(empty)
    assert out.shape == (0, *plain(x).shape[1:])
    assert layer.example_norms(empty).shape == (0,)
    out.sum().backward()
    assert empty.grad.shape == empty.shape
    for parameter in layer.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[5], CASES[10], CASES[13]], ids=str)
def test_gradcheck(case):
    layer, _, x = build(case)
    layer.gradient_scaler = lambda norms: torch.ones_like(norms)
    values = tuple(p.detach().requires_grad_() for p in layer.parameters())
    names = [n for n, _ in layer.named_parameters()]

    def function(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (x[:2].detach().requires_grad_(), *values))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("scaler", [None, lambda norms: 1 / norms])
def test_autocast_sums_the_gradient_in_float32(case, backward_inside, scaler):
    layer, plain, x = build(case, torch.float32)
    seen = []
    layer.gradient_scaler = scaler and (lambda norms: seen.append(norms) or scaler(norms))
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
        assert out.dtype == torch.bfloat16
        cotangent = torch.randn_like(out)
        if backward_inside:
            out.backward(cotangent)
    if not backward_inside:
        out.backward(cotangent)
    with torch.no_grad():
        exact = layer.example_norms(x)
    factor = torch.ones(6) if scaler is None else scaler(exact)
    assert all(n.dtype == torch.float32 and torch.equal(n, exact) for n in seen)
    alone = per_example(plain, x, cotangent.float())
    for name, parameter in layer.named_parameters():
        expected = sum(c * g[name] for c, g in zip(factor, alone, strict=True))
        assert parameter.grad.dtype == torch.float32
        # far below the 2^-9 of a sum that is rounded to bfloat16: only the order of addition differs
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-5)


def test_torchs_own_layer_rounds_the_sum_under_autocast():
    """What the custom function is for: at a large batch the rounding of the sum exceeds one example's part."""
    torch.manual_seed(0)
    plain, layer = nn.Linear(8, 4), ScaledLinear(8, 4)
    layer.load_state_dict(plain.state_dict())
    x, cotangent = torch.rand(4096, 8), torch.rand(4096, 4)
    errors = []
    for module in (plain, layer):
        with torch.autocast("cpu", torch.bfloat16):
            module(x).backward(cotangent.bfloat16())
        errors.append(float((module.weight.grad - cotangent.bfloat16().float().t() @ x).abs().max()))
    assert errors[0] > 1.0 > 0.05 > errors[1]


def test_norms_of_large_constant_images_are_accurate():
    """vector_norm in float32 is off by more than the margin of the mechanism here; so would its scaling be."""
    x = torch.full((1, 3, 224, 224), 1 / 3)
    layer = ScaledLinear(3 * 224 * 224, 1, bias=False)
    exact = float(x.double().norm())
    assert abs(float(torch.linalg.vector_norm(x.flatten(1), dim=1)) / exact - 1) > 2**-16
    assert float(layer.example_norms(x.flatten(1))) == pytest.approx(exact, rel=2**-20)
    conv = ScaledConv2d(3, 2, 3, bias=False)
    squared = float(conv.double().example_norms(x.double())) ** 2
    assert float(conv.float().example_norms(x)) == pytest.approx(math.sqrt(squared), rel=2**-20)


class Largest(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(ScaledLinear(48, 32), (48,)), (ScaledLinear(48, 32), (6, 48)), (ScaledConv2d(8, 16, 3, padding=1), (8, 5, 5)),
     (ScaledConv1d(16, 16, 5, groups=2), (16, 9))],
    ids=str,
)  # fmt: skip
def test_no_per_sample_gradient_is_materialised(layer, shape):
    batch = 32
    layer.gradient_scaler = lambda norms: 1 / norms
    x = torch.randn(batch, *shape, requires_grad=True)
    with Largest() as largest:
        layer(x).square().sum().backward()
    assert largest.numel <= max(x.numel(), layer(x).numel()) < batch * layer.weight.numel()
    with Largest() as largest:  # the same check sees the per-sample gradients of a vmap
        torch.func.vmap(torch.func.grad(lambda w, row: F.linear(row, w).sum()), (None, 0))(
            torch.ones(32, 48), torch.ones(batch, 48)
        )
    assert largest.numel >= batch * 32 * 48


@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_copies_pickles_and_state(case):
    layer, plain, x = build(case)
    assert list(layer.state_dict()) == list(plain.state_dict())
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is type(layer)
        torch.testing.assert_close(twin(x), plain(x), rtol=1e-12, atol=1e-12)
    plain.load_state_dict(layer.state_dict())


def test_no_scaler_runs_without_gradients():
    layer = ScaledLinear(3, 2)
    layer.gradient_scaler = lambda norms: pytest.fail("nothing to scale")
    with torch.no_grad():
        layer(torch.randn(2, 3))
