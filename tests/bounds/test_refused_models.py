"""Models that no certificate may be given for, each refused by name and with the fix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipdp_lightning.audit import attack
from lipdp_lightning.bounds import CertificationError, certify
from lipdp_lightning.bounds.losses import CrossEntropy
from lipdp_lightning.layers import make_private

close = pytest.approx


class Graph(nn.Module):
    """A forward given as a function of the model and the input; tensors become buffers."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def refusal(model: nn.Module, shape: tuple[int, ...] = (4,), bound: Any = 1.0, loss: Any = "cross_entropy") -> str:
    with pytest.raises(CertificationError) as refused:
        certify(model, shape, bound, loss)
    message = str(refused.value)
    assert message.count("HINT: ") == len(refused.value.problems) >= 1
    return message


def test_all_problems_are_named_at_once() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.RReLU(), nn.LayerNorm(4), nn.Dropout2d(0.1), nn.Linear(4, 2).half()
    )
    message = refusal(model, bound=0.0, loss=nn.CrossEntropyLoss())
    for part in (
        "BatchNorm1d",
        "RReLU",
        "LayerNorm",
        "Dropout2d",
        "5.weight",
        "5.bias",
        "input_bound",
        "mean over the batch",
    ):
        assert part in message, part
    assert "8 problems" in message


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan, "1", None])
def test_an_input_bound_that_is_no_radius_is_refused(bound: Any) -> None:
    assert "input_bound" in refusal(nn.Sequential(nn.Linear(4, 2)), bound=bound)


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64])
def test_dtypes_without_a_margin_are_refused(dtype: torch.dtype) -> None:
    assert "dtype" in refusal(nn.Sequential(nn.Linear(4, 2).to(dtype)))
    with pytest.raises(CertificationError, match="compute_dtype"):
        certify(nn.Sequential(nn.Linear(4, 2)), (4,), 1.0, "hinge", compute_dtype=dtype)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x + y)


def test_models_of_another_form_are_refused() -> None:
    layer = nn.Linear(4, 2)
    assert "positional argument" in refusal(TwoInputs())
    assert "one tensor of logits" in refusal(Graph(lambda m, x: (m.layer(x), x), layer=layer))
    assert "one tensor of logits" in refusal(Graph(lambda m, x: {"logits": m.layer(x)}, layer=layer))
    assert "fails on an input" in refusal(nn.Sequential(nn.Linear(5, 2)))


BATCH_MIXING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "mean over 0": lambda m, x: m.layer(x - x.mean(0, keepdim=True)),
    "mean over -2": lambda m, x: m.layer(x - x.mean(-2, keepdim=True)),
    "mean over all": lambda m, x: m.layer(x) + x.mean(),
    "sum over 0": lambda m, x: m.layer(x + x.sum(0)),
    "division by the batch size": lambda m, x: m.layer(x) / x.size(0),
    "product with the batch size": lambda m, x: m.layer(x) * x.shape[0],
    "a number that agrees at small batches": lambda m, x: m.layer(x) * (1 + x.size(0) // 4),
    "a remainder of the batch size": lambda m, x: m.layer(x) * (x.shape[0] // 64 + 1.0),
    "batch size added": lambda m, x: m.layer(x) + x.numel(),
    "view": lambda m, x: m.layer(x.view(-1, 2).repeat(1, 2)),
    "view across rows": lambda m, x: m.narrow(x.view(-1, 2)),
    "reshape to one row": lambda m, x: x.reshape(1, -1),
    "flatten from 0": lambda m, x: x.flatten(0),
    "cat along 0": lambda m, x: m.layer(torch.cat([x, x], 0)),
    "cat by default": lambda m, x: m.layer(torch.cat([x, x])),
    "stack along 0": lambda m, x: torch.stack([m.layer(x), m.layer(x)]),
    "one row": lambda m, x: m.layer(x[0]),
    "one row for all": lambda m, x: m.layer(x + x[0:1]),
    "rows reversed": lambda m, x: m.layer(x[torch.arange(1)]),
    "flip of rows": lambda m, x: m.layer(x.flip(0)),
    "roll of rows": lambda m, x: m.layer(torch.roll(x, 1, 0)),
    "roll of all": lambda m, x: m.layer(torch.roll(x, 1)),
    "transpose": lambda m, x: m.layer(x.transpose(0, 1).transpose(0, 1)),
    "permute": lambda m, x: m.layer(x.permute(1, 0).permute(1, 0)),
    "softmax over rows": lambda m, x: m.layer(torch.softmax(x, 0)),
    "chunk of rows": lambda m, x: m.layer(x.chunk(2, 0)[0]),
    "unbind of rows": lambda m, x: m.layer(torch.stack(x.unbind(), 0)),
    "gram matrix": lambda m, x: m.layer(x @ x.T @ x),
    "maximum": lambda m, x: m.layer(x / x.max()),
    "broadcast": lambda m, x: m.layer((x.unsqueeze(0) - x.unsqueeze(1)).sum(0)),
    "padding of rows": lambda m, x: m.layer(F.pad(x, (0, 0, 1, 1))),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCH_MIXING)
def test_whatever_mixes_examples_is_refused(name: str) -> None:
    refusal(Graph(BATCH_MIXING[name], layer=nn.Linear(4, 4), narrow=nn.Linear(2, 4)))


def test_shapes_may_be_computed_from_the_batch_size() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.layer(x.view(x.size(0), x.numel() // x.shape[0])) * x.shape[1]

    assert certify(Graph(forward, layer=nn.Linear(4, 2)), (2, 2), 1.0, "hinge").node("mul").lipschitz == close(
        (2.0,), rel=1e-5
    )


CONTROL_FLOW: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "if on values": lambda m, x: m.layer(x) if x.sum() > 0 else x,
    "loop on values": lambda m, x: next(m.layer(x) for _ in range(int(x.shape[1]))),
    "length": lambda m, x: m.layer(x) / len(x),
    "training mode": lambda m, x: m.layer(x) * (10.0 if m.training else 1.0),
}


@pytest.mark.parametrize("name", CONTROL_FLOW)
@pytest.mark.parametrize("training", [True, False])
def test_control_flow_is_refused(name: str, training: bool) -> None:
    assert "cannot be traced" in refusal(Graph(CONTROL_FLOW[name], layer=nn.Linear(4, 4)).train(training))


def test_the_modules_modes_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[1].eval()
    certify(model, (4,), 1.0, "hinge")
    assert [m.training for m in model.modules()] == [True, True, False, True]


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 10.0 * super().forward(input)


class Named(nn.Linear):
    """Computes what its parent computes."""


def test_a_subclass_that_computes_otherwise_does_not_get_its_parents_bound() -> None:
    torch.manual_seed(0)
    plain, named, changed = (nn.Sequential(kind(4, 2, bias=False)) for kind in (nn.Linear, Named, Doubled))
    for model in (named, changed):
        model.load_state_dict(plain.state_dict())
    expected = certify(plain, (4,), 1.0, "hinge").group("0").worst_case
    assert certify(named, (4,), 1.0, "hinge").group("0").worst_case == expected
    assert certify(changed, (4,), 1.0, "hinge").group("0").worst_case == close(10 * expected, rel=1e-5)


def test_hooks_and_replaced_forwards_are_refused() -> None:
    layer = nn.Linear(4, 2)
    layer.register_forward_hook(lambda module, inputs, output: 10 * output)
    assert "hook" in refusal(nn.Sequential(layer))
    layer = nn.Linear(4, 2)
    layer.register_forward_pre_hook(lambda module, inputs: (10 * inputs[0],))
    assert "hook" in refusal(nn.Sequential(layer))
    model = nn.Sequential(nn.Linear(4, 2))
    model.register_full_backward_hook(lambda module, into, out: (None,))
    assert "hook" in refusal(model)
    layer = nn.Linear(4, 2)
    layer.forward = lambda x: 10 * F.linear(x, layer.weight)  # type: ignore[method-assign]
    assert "replaced" in refusal(nn.Sequential(layer))


class Louder(torch.autograd.Function):
    """The identity, with a thousand times the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # type: ignore[override]
        return 1000 * cotangent


def test_a_custom_gradient_is_refused() -> None:
    model = Graph(lambda m, x: m.b(Louder.apply(m.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 2))
    assert "Louder" in refusal(model)
    assert float(Louder.apply(torch.ones(1, requires_grad=True)).grad_fn is not None)  # apply is itself again


def test_a_parameter_that_a_rule_passes_over_is_refused() -> None:
    """The limit of clamp is trained: its gradient sums over all entries above it, and no rule bounds that."""
    limit = nn.Parameter(torch.tensor([0.1]))
    model = Graph(lambda m, x: m.layer(torch.clamp(x + m.limit, max=m.limit)), layer=nn.Linear(4, 2), limit=limit)
    assert "clamp" in refusal(model)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.layer(torch.cat(x.chunk(2, 1), 1)),
        lambda m, x: (lambda p: m.layer(torch.cat(p, 1)) + torch.cat([p[0], p[0]], 1))(x.chunk(2, 1)),
        lambda m, x: m.layer(torch.stack(x.chunk(2, 1)[0:1], 1).flatten(1)),
        lambda m, x: m.layer(x.prod(1, keepdim=True)),
        lambda m, x: m.layer(x.unflatten(1, (2, 2)).mT.flatten(1)),
        lambda m, x: m.layer(m.layer(x).data),
        lambda m, x: m.layer(x.view(torch.int32).float()),
        lambda m, x: m.layer(x.to(torch.bfloat16).float()),
        lambda m, x: m.layer(x.detach() * x),
        lambda m, x: m.layer(x) % 2,
        lambda m, x: F.linear(x, m.layer.weight * 2.0),
        lambda m, x: F.linear(x, m.layer.weight, m.layer(x)),
    ],
)
def test_calls_that_a_rule_does_not_cover_are_refused_by_name(function: Callable[[Any, Tensor], Tensor]) -> None:
    refusal(Graph(function, layer=nn.Linear(4, 4)))


@pytest.mark.parametrize(
    ("function", "sound"),
    [
        (lambda m, x: F.selu(m.layer(x), inplace=True), True),
        (lambda m, x: (lambda y: y + F.selu(y, inplace=True))(m.layer(x)), False),
        (lambda m, x: (lambda y: y + F.selu(y, True))(m.layer(x)), False),
        (lambda m, x: (lambda y: m.act(y) + y)(m.layer(x)), False),
        (lambda m, x: (lambda y: y + m.act(y.view(-1, 4)))(m.layer(x)), False),
        (lambda m, x: (lambda y: y.flatten(1).tanh_() + y)(m.layer(x)), False),
        (lambda m, x: m.layer(x.tanh_()), False),
        (lambda m, x: (lambda y: m.act(2.0 * y) + y)(m.layer(x)), True),
        (lambda m, x: (lambda y: y.add_(1.0) + x)(m.layer(x)), True),
        (lambda m, x: (lambda y: y.mul_(2.0) + y)(m.layer(x)), False),
    ],
)
def test_values_overwritten_in_place(function: Callable[[Any, Tensor], Tensor], sound: bool) -> None:
    model = Graph(function, layer=nn.Linear(4, 4), act=nn.SELU(inplace=True))
    if sound:
        assert not attack(model, (4,), 1.0, CrossEntropy(), restarts=6, steps=4).violations()
    else:
        assert "in place" in refusal(model)


def test_a_slot_that_is_overwritten_after_it_was_read_would_break_its_bound() -> None:
    """The reason for the refusal: y + selu_(y) adds 2 selu(y), of slope 3.52, where the graph shows 2.76."""
    y = torch.full((1,), -1e-6, requires_grad=True)
    z = 1.0 * y
    (slope,) = torch.autograd.grad((F.selu(z, inplace=True) + z).sum(), y)
    assert float(slope) == close(2 * 1.7581, rel=1e-3)
    assert float(slope) > 1.2 * (1 + 1.7581)


def test_an_overflowing_bound_is_refused() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    with torch.no_grad():
        model[1].weight.fill_(1e16)
    assert "overflows" in refusal(model)


class _Detour(nn.Module):
    """Its groups' bounds are ordinary; a value or a cotangent on the way is not."""

    def __init__(self, factors: tuple[float, ...]) -> None:
        super().__init__()
        self.first, self.second, self.factors = nn.Linear(4, 4), nn.Linear(4, 2), factors

    def forward(self, x):
        x = self.first(x)
        for factor in self.factors:
            x = x * factor
        return self.second(x)


@pytest.mark.parametrize(
    "factors", [(1e30, 1e30, 1e-30, 1e-30), (1e-30, 1e-30, 1e30, 1e30)], ids=["forward", "backward"]
)
def test_values_that_overflow_between_layers_are_refused(factors):
    with pytest.raises(CertificationError, match="overflows"):
        certify(_Detour(factors), (4,), 1.0, "cross_entropy")
    certify(_Detour((2.0, 0.5)), (4,), 1.0, "cross_entropy")


def test_a_bare_layer_is_its_own_module():
    layer = make_private(nn.Linear(4, 3))
    use = certify(layer, (4,), 1.0, "cross_entropy").groups[0].uses[0]
    assert layer.get_submodule(use.module) is layer
