"""Functions of torch on bare parameters: the certified graph sums their gradients in pieces, as layers do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from private_step import Harness, make_plan
from test_pieces import ROWS, values
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lipdp_lightning.bounds import Bound, CertificationError, Certifier, Operation, ParameterUse, Value, rule
from lipdp_lightning.bounds.registry import in_pieces, registered
from lipdp_lightning.layers import ScaledLinear, contribution, functions
from lipdp_lightning.mechanism.allocation import sum_margin


class Bare(nn.Module):
    """A function of torch on parameters of the network; ``cotangent`` makes that of the function equal to the input."""

    def __init__(self, function: Callable[..., Tensor], weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(weight, requires_grad=bias is None)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


IMAGE, SIGNAL, ROW = (8, 32, 32), (8, 1024), (1024, 8)
PADDED: dict[str, Any] = {"padding": 1}
LONG: dict[str, tuple[Callable[[], Bare], tuple[int, ...]]] = {
    "linear": (lambda: Bare(F.linear, torch.ones(4, 8)), ROW),
    "linear by name": (lambda: Bare(lambda x, w, b: F.linear(input=x, weight=w, bias=b), torch.ones(4, 8)), ROW),
    "conv1d": (lambda: Bare(lambda x, w, b: F.conv1d(x, w, b, **PADDED), torch.ones(8, 8, 3)), SIGNAL),
    "conv2d": (lambda: Bare(lambda x, w, b: F.conv2d(x, w, b, **PADDED), torch.ones(8, 8, 3, 3)), IMAGE),
    "conv2d, same": (lambda: Bare(lambda x, w, b: F.conv2d(x, w, b, padding="same"), torch.ones(8, 8, 2, 2)), IMAGE),
    "transposed": (lambda: Bare(lambda x, w, b: F.conv_transpose2d(x, w, b, 1, 1), torch.ones(8, 8, 3, 3)), IMAGE),
    "transposed 1d": (lambda: Bare(lambda x, w, b: F.conv_transpose1d(x, w, b, 2, 1), torch.ones(8, 8, 3)), SIGNAL),
    "a bias alone": (lambda: Bare(F.conv2d, torch.ones(8, 8, 1, 1), torch.ones(8)), IMAGE),
}


def shift(network: nn.Module, row: Tensor, value: float) -> float:
    """How far one more row moves the sum that a private step would release, over the norm of the row's own gradient."""
    certifier = Certifier(network, tuple(row.shape), 1e3, "hinge")
    (trained,) = [p for p in network.parameters() if p.requires_grad]

    def gradient(number: int, run: Callable[[Tensor], Tensor], kind: torch.dtype) -> Tensor:
        out = run(row.to(kind).expand(number, *row.shape))
        (found,) = torch.autograd.grad(out, trained, torch.full_like(out, value))
        return found.double()

    many = [gradient(n, certifier.run, torch.float32) for n in range(ROWS - 3, ROWS + 1)]
    own = gradient(1, network.double(), torch.float64).norm()
    return max(float((more - less).norm() / own) for less, more in itertools.pairwise(many))


@pytest.mark.parametrize("name", LONG)
def test_one_row_moves_the_sum_of_a_bare_parameter_within_the_margin(name: str, monkeypatch: Any) -> None:
    build, shape = LONG[name]

    def worst() -> float:
        return max(shift(build(), torch.full(shape, value), value**2 - 0.3) for value in values())

    assert worst() <= sum_margin(ROWS)
    monkeypatch.setattr("lipdp_lightning.bounds.certifier.calls_in_pieces", lambda steps: {})
    monkeypatch.setattr(Certifier, "refuse_sums_of_torch", lambda self: None)
    assert worst() > 1.002 > sum_margin(ROWS), "with torch's own sum, the same check fails"


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


CALLS: dict[str, tuple[Any, Tensor, Tensor, Callable[..., Tensor]]] = {
    "linear": (F.linear, drawn(5, 3, 4), drawn(2, 4), lambda f, x, w, b: f(x, w, b)),
    "conv1d": (F.conv1d, drawn(5, 4, 9), drawn(2, 2, 3), lambda f, x, w, b: f(x, w, b, (2,), [1], 2, 2)),
    "conv2d": (F.conv2d, drawn(5, 4, 7, 6), drawn(2, 4, 2, 3), lambda f, x, w, b: f(x, w, bias=b, stride=(2, 1),
               padding=(0, 2), dilation=(1, 2))),
    "same": (F.conv2d, drawn(5, 4, 7, 6), drawn(2, 4, 2, 3), lambda f, x, w, b: f(x, w, b, padding="same")),
    "valid": (F.conv2d, drawn(5, 4, 7, 6), drawn(2, 4, 2, 3), lambda f, x, w, b: f(x, w, b, padding="valid")),
    "transposed 1d": (F.conv_transpose1d, drawn(5, 4, 5), drawn(4, 2, 3), lambda f, x, w, b: f(x, w, b, 3, 1, 2)),
    "transposed 2d": (F.conv_transpose2d, drawn(5, 4, 5, 4), drawn(4, 1, 3, 2), lambda f, x, w, b: f(
        x, w, b, (2, 3), padding=(1, 0), output_padding=(1, 2), groups=2, dilation=(2, 1))),
}  # fmt: skip


@pytest.mark.parametrize("rows", [5, 0])
@pytest.mark.parametrize("name", CALLS)
def test_a_function_in_pieces_computes_what_the_one_of_torch_does(name: str, rows: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(contribution, "TERMS_OF_A_PIECE", 7)
    function, x, weight, call = CALLS[name]
    mine: Any = in_pieces(function)
    bias = drawn(call(function, x, weight, None).shape[-1 if name == "linear" else 1])
    given = [t.clone().requires_grad_() for t in (x[:rows], weight, bias)]
    for out, wanted in (
        (call(mine, *given), call(function, *given)),
        (call(mine, *given[:2], None), call(function, *given[:2], None)),
    ):
        torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
        cotangent = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
        found = torch.autograd.grad(out, given, cotangent, allow_unused=True)
        for a, b in zip(found, torch.autograd.grad(wanted, given, cotangent, allow_unused=True), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_every_function_with_a_weight_is_summed_in_pieces() -> None:
    named = {getattr(t, "__name__", t) for t in registered() if not isinstance(t, type) and in_pieces(t) is not None}
    assert named == {"linear", "conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d"}


class Subclass(nn.Linear):
    """It computes what nn.Linear does, and is not swapped for the library's layer."""


def test_weights_that_torch_would_sum_are_refused_in_set_up_and_all_at_once() -> None:
    network = nn.Sequential(Subclass(12, 8), nn.ReLU(), Subclass(8, 6), nn.ReLU(), nn.Linear(6, 5))
    with pytest.raises(ValueError, match=r"2 problems:[\s\S]*- 0: torch would sum[\s\S]*HINT: use nn.Linear"):
        Harness(network, (12,), make_plan(scaling="worst_case"))
    network[0].requires_grad_(False)
    network[2] = ScaledLinear(8, 6)
    Harness(network, (12,), make_plan(scaling="worst_case"))


def test_a_layer_put_into_the_network_after_set_up_is_refused() -> None:
    network = nn.Sequential(ScaledLinear(4, 3))
    certifier = Certifier(network, (4,), 1.0, "hinge")
    certifier.refuse_sums_of_torch()
    network[0] = nn.Linear(4, 3)
    certifier.certify()
    with pytest.raises(CertificationError, match="torch would sum"):
        certifier.run(torch.ones(2, 4))


class Plain(nn.Module):
    """A network with a layer and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = ScaledLinear(4, 3), nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layer(x), self.weight)


class Hides(Plain):
    """It computes something else once ``trains`` is set, which a network may find out in ways that no reader sees."""

    trains = False

    def forward(self, x: Tensor) -> Tensor:
        return (100 if self.trains else 1) * super().forward(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_certified_graph_runs_also_where_the_network_is_compiled(compiled: bool) -> None:
    network, x = Hides(), torch.randn(5, 4)
    wanted = network(x)
    if compiled:
        network.compile(backend="eager")
    torch._dynamo.reset()
    counters.clear()
    certifier = Certifier(network, (4,), 1.0, "hinge")
    Hides.trains = True
    try:
        found = certifier.run(x)
        assert torch.allclose(network(x), 100 * wanted)
    finally:
        Hides.trains = False
    assert torch.allclose(found, wanted)
    assert (counters["stats"]["unique_graphs"] > 0) is compiled


def test_a_compiled_network_sums_bare_parameters_in_pieces() -> None:
    """Equal rows, whose sum in one product of float32 is far off."""
    gradients = []
    for compiled in (False, True):
        network = Bare(F.linear, torch.ones(3, 4))
        if compiled:
            network.compile(backend="eager")
        certifier = Certifier(network, (4,), 1.0, "hinge")
        gradients.append(torch.autograd.grad(certifier.run(torch.full((ROWS, 4), 0.1)).sum(), network.weight)[0])
    assert torch.equal(*gradients)


class Own(nn.Module):
    """A layer with a rule of its own."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


@rule(Own)
def own(op: Operation, x: Value) -> Bound:
    """A factor that is large enough for all of these."""
    weight = op.module.weight
    size = math.sqrt(math.prod(x.shape)) * float(weight.detach().norm())
    return Bound(size * x.norm, size, uses=(ParameterUse((weight,), size * x.norm),))


class ByHand(torch.autograd.Function):
    """A product whose gradient users wrote."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return cotangent @ weight, cotangent.T @ x


OF_TORCH: dict[str, tuple[Own, tuple[int, ...]]] = {
    "a product": (Own(lambda x, w: x @ w.T, 3, 8), (8,)),
    "F.linear": (Own(lambda x, w: F.linear(x, 2 * w), 3, 8), (8,)),
    "einsum": (Own(lambda x, w: torch.einsum("bi,oi->bo", x, w), 3, 8), (8,)),
    "a convolution": (Own(lambda x, w: F.conv1d(x, w), 3, 2, 3), (2, 9)),
    "a norm": (Own(lambda x, w: F.layer_norm(x, (8,), w), 8), (8,)),
    "positions": (Own(lambda x, w: F.embedding(x.long().clamp(0, 2), w) + x.unsqueeze(-1), 3, 4), (8,)),
    "by hand": (Own(ByHand.apply, 3, 8), (8,)),
}
IN_ORDER: dict[str, tuple[Own, tuple[int, ...]]] = {
    "entries": (Own(lambda x, w: x * w.exp() + w, 8), (8,)),
    "in pieces": (Own(functions.linear, 3, 8), (8,)),
    "a product of weights": (Own(lambda x, w: functions.linear(x, w @ w), 8, 8), (8,)),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_layer_of_the_users_own_whose_weight_torch_would_sum_is_refused(name: str) -> None:
    layer, shape = OF_TORCH[name]
    certifier = Certifier(nn.Sequential(layer, nn.Flatten()), shape, 1.0, "hinge")
    with pytest.raises(CertificationError, match=r"- 0: \w+: torch would sum .*[\s\S]*HINT: multiply by it through"):
        certifier.refuse_sums_of_torch()


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_layer_of_the_users_own_that_is_summed_well_is_taken(name: str) -> None:
    layer, shape = IN_ORDER[name]
    Certifier(nn.Sequential(layer, nn.Flatten()), shape, 1.0, "hinge").refuse_sums_of_torch()


@pytest.mark.parametrize("name", ["a product", "entries", "in pieces"])
def test_one_row_moves_the_sum_of_an_own_layer_as_its_refusal_says(name: str, monkeypatch: Any) -> None:
    shape = (1024, 8)
    functions_of = {
        "a product": (lambda x, w: x @ w.T, (4, 8)), "entries": (lambda x, w: x * w, (8,)),
        "in pieces": (functions.linear, (4, 8)),
    }  # fmt: skip
    monkeypatch.setattr(Certifier, "refuse_sums_of_torch", lambda self: None)
    function, weight = functions_of[name]
    worst = max(shift(Own(function, *weight), torch.full(shape, value), value**2 - 0.3) for value in values())
    assert (worst > sum_margin(ROWS)) is (name == "a product")
