"""Certificates of graphs against hand-computed ones, and what must be refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipdp_lightning.audit import attack
from lipdp_lightning.bounds import Certificate, CertificationError, Certifier, certify
from lipdp_lightning.bounds.graph import trace
from lipdp_lightning.bounds.losses import Huber
from lipdp_lightning.bounds.registry import NormSource
from lipdp_lightning.bounds.rounding import OPERATION_MARGIN, RoundedNorms
from lipdp_lightning.layers import CotangentClip, Residual, make_private
from lipdp_lightning.norms import Dense, dense_norm

ROOT2 = math.sqrt(2.0)
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


def linear(norm: float, bias: float | None = None, size: int = 2) -> nn.Linear:
    """A layer of given norm, norm times the identity, with a bias of given norm or none."""
    layer = nn.Linear(size, size, bias=bias is not None)
    with torch.no_grad():
        layer.weight.copy_(norm * torch.eye(size))
        if bias is not None:
            layer.bias.copy_(torch.eye(size)[0] * bias)
    return layer


def exact(
    model: nn.Module, shape: tuple[int, ...] = (2,), bound: float = 1.0, loss: Any = "cross_entropy"
) -> Certificate:
    return certify(model.double(), shape, bound, loss, compute_dtype=torch.float64)


def cotangents(certificate: Certificate) -> dict[str, float]:
    return {n.name: n.cotangent for n in certificate.nodes}


def delta(certificate: Certificate, name: str, scaling: str = "worst_case") -> float:
    return certificate.sensitivities(scaling)[name]


def test_sequential_by_hand() -> None:
    model = make_private(nn.Sequential(linear(2.0, 1.0), nn.ReLU(), linear(0.5)))
    found = exact(model, bound=3.0)
    # X: 3 -> 2*3 + 1 = 7 -> 7 -> 3.5; l: sqrt2 at the output, /2 before the last layer, times 2 at the input
    assert [n.forward for n in found.nodes] == close([3.0, 7.0, 7.0, 3.5], rel=1e-9)
    assert [n.cotangent for n in found.nodes] == close([ROOT2, ROOT2 / 2, ROOT2 / 2, ROOT2], rel=1e-9)
    assert delta(found, "0") == close(ROOT2 / 2 * math.sqrt(3**2 + 1), rel=1e-9)
    assert delta(found, "2") == close(ROOT2 * 7, rel=1e-9)
    assert delta(found, "0", "layerwise") == close(ROOT2 / 2, rel=1e-9)
    assert delta(found, "2", "layerwise") == close(ROOT2, rel=1e-9)


def test_a_layers_own_norm_does_not_enter_its_own_bound() -> None:
    small, large = (exact(nn.Sequential(linear(norm))) for norm in (0.2, 5.0))
    assert delta(small, "0") == close(delta(large, "0"), rel=1e-9)


def test_positions_multiply_the_bias() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Flatten())
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[0].bias.copy_(torch.tensor([0.0, 1.0]))
    found = exact(model, (9, 2), 2.0)
    assert found.node("_0").forward == close(2.0 + 3.0, rel=1e-9)
    assert found.group("0").uses[0].gradient_factor == close(math.sqrt(2.0**2 + 9), rel=1e-9)


def test_convolution_by_hand() -> None:
    model = make_private(nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.Flatten()))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[[0.0, 2.0, 0.0]]]))
        model[0].bias.fill_(1.0)
    found = exact(model, (1, 5), 1.0)
    # the kernel is 2 times the identity; a pixel is read by three patches; five output positions
    assert found.node("_0").forward == close(2.0 + math.sqrt(5.0), rel=1e-6)
    assert found.group("0").uses[0].gradient_factor == close(math.sqrt(3.0 + 5.0), rel=1e-9)
    assert found.group("0").worst_case == close(ROOT2 * math.sqrt(8.0), rel=1e-9)


def test_residual_by_hand() -> None:
    block = Residual(nn.Sequential(linear(3.0), nn.ReLU()), body_scale=0.5, shortcut_scale=0.25)
    found = exact(nn.Sequential(linear(1.0), block))
    assert cotangents(found)["_0"] == close(ROOT2 * (0.25 + 0.5 * 3.0), rel=1e-9)
    assert found.node(found.output).forward == close(0.25 + 1.5, rel=1e-9)
    assert delta(found, "1.body.0") == close(0.5 * ROOT2, rel=1e-9)


def test_branches_add_by_slots_and_cat_by_root_of_squares() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(torch.cat([m.left(m.stem(x)), m.right(x)], 1))

    model = Graph(forward, stem=linear(2.0), left=linear(3.0), right=linear(4.0), head=linear(1.0, size=4))
    found = exact(model)
    assert found.node("cat").forward == close(math.hypot(6.0, 4.0), rel=1e-9)
    assert cotangents(found)["stem"] == close(ROOT2 * 3.0, rel=1e-9)
    # the sum over slots would be 2*3 + 4 = 10; through cat the paths combine as sqrt(6^2 + 4^2)
    assert cotangents(found)["x"] == close(ROOT2 * math.hypot(6.0, 4.0), rel=1e-9)


@pytest.mark.parametrize(
    ("function", "factor"),
    [
        (lambda m, x: m.head(m.stem(x) + m.stem(x)), 2.0),
        (lambda m, x: (lambda y: m.head(y + y))(m.stem(x)), 2.0),
        (lambda m, x: (lambda y: m.head(y - 0.5 * y))(m.stem(x)), 1.5),
        (lambda m, x: (lambda y: m.head(torch.add(y, y, alpha=3)))(m.stem(x)), 4.0),
        (lambda m, x: (lambda y: m.wide(torch.cat([y, y], 1)))(m.stem(x)), ROOT2),
        (lambda m, x: (lambda y: m.wide(torch.cat([y, 0.5 * y], 1)))(m.stem(x)), math.hypot(1.0, 0.5)),
        (lambda m, x: (lambda y: m.wide(torch.stack([y, y], 1).flatten(1)))(m.stem(x)), ROOT2),
    ],
)
def test_shared_values_count_every_slot(function: Callable[[Any, Tensor], Tensor], factor: float) -> None:
    """torch.fx lists a node that reads a value twice as one user."""
    model = Graph(function, stem=linear(1.0), head=linear(1.0), wide=linear(1.0, size=4))
    called = {str(n.target) for n in trace(model).graph.nodes if n.op == "call_module"}
    delattr(model, "wide" if "head" in called else "head")
    found = exact(model)
    assert sum(n.cotangent for n in found.nodes if n.operation == "stem") == close(ROOT2 * factor, rel=1e-9)


def test_the_bounds_of_a_reused_layer_add_and_this_is_attained() -> None:
    """f(x) = w w x has derivative 2 w x in w: root of squares, sqrt(2) |w x|, would be false."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 0.75)
    model = make_private(nn.Sequential(layer, layer))
    found = exact(model, (1,), 1.0, Huber())
    assert len(found.groups) == 1 and len(found.groups[0].uses) == 2
    assert found.groups[0].worst_case == close(2 * 0.75, rel=1e-9)
    report = attack(model, (1,), 1.0, Huber(), restarts=4, steps=4)
    assert report.groups[0].worst_case == close(1.0, rel=1e-9)
    assert report.groups[0].worst_case * found.groups[0].worst_case > 1.05 * math.hypot(0.75, 0.75)


def test_a_layer_called_on_two_branches_is_one_group() -> None:
    layer = linear(0.5, 0.2)
    found = exact(make_private(Graph(lambda m, x: m.a(x) + 2.0 * m.b(torch.relu(x)), a=layer, b=layer)))
    assert [len(g.uses) for g in found.groups] == [2]
    assert found.groups[0].worst_case == close(ROOT2 * (1 + 2) * ROOT2, rel=1e-9)
    assert found.groups[0].layerwise == close(ROOT2 * 3, rel=1e-9)


def test_tied_weights_merge_with_both_biases() -> None:
    first, second = linear(0.5, 0.0), linear(0.5, 0.0)
    second.weight = first.weight
    model = make_private(nn.Sequential(first, second))
    found = exact(model)
    assert [g.parameters for g in found.groups] == [("0.weight", "0.bias", "1.bias")]
    # uses: sqrt2 * 0.5 * sqrt(1 + 1) and sqrt2 * sqrt(0.25 + 1)
    assert found.groups[0].worst_case == close(ROOT2 * 0.5 * ROOT2 + ROOT2 * math.sqrt(1.25), rel=1e-9)
    assert not attack(model, (2,), 1.0, "cross_entropy", restarts=6, steps=4).violations()


def test_functional_calls_have_the_layers_bounds() -> None:
    weight, bias = nn.Parameter(2.0 * torch.eye(2)), nn.Parameter(torch.tensor([0.6, 0.8]))
    functional = Graph(lambda m, x: F.relu(F.linear(x, m.weight, bias=m.bias)), weight=weight, bias=bias)
    layer = nn.Linear(2, 2)
    layer.load_state_dict({"weight": weight, "bias": bias})
    expected = exact(nn.Sequential(layer, nn.ReLU()))
    found = exact(functional)
    assert [n.forward for n in found.nodes] == [n.forward for n in expected.nodes]
    assert [g.worst_case for g in found.groups] == [g.worst_case for g in expected.groups]
    # without a layer that could scale it, layerwise keeps the worst case
    assert found.groups[0].layerwise == found.groups[0].worst_case


def test_members_of_a_tuple_combine_by_root_of_squares() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        a, b = m.stem(x).chunk(2, dim=1)
        return m.head(torch.cat([3.0 * a, 4.0 * b], 1))

    found = exact(Graph(forward, stem=linear(1.0, size=4), head=linear(1.0, size=4)), (4,))
    assert cotangents(found)["stem"] <= ROOT2 * 5.0 * (1 + 1e-9)


def test_one_member_under_two_indices_adds() -> None:
    """parts[0] and parts[-2] are the same tensor: root of squares would be false, and here is attained."""

    def forward(m: Any, x: Tensor) -> Tensor:
        parts = m.stem(x).chunk(2, dim=1)
        return parts[0] + parts[-2] + 0.0 * parts[1]

    model = Graph(forward, stem=linear(1.0, size=4))
    found = exact(model, (4,), loss=Huber())
    assert cotangents(found)["stem"] == close(2.0 * found.loss_lipschitz, rel=1e-9)
    report = attack(model, (4,), 1.0, Huber(), restarts=6, steps=4)
    assert report.group("stem").worst_case == close(1.0, rel=1e-9)


def test_clipped_cotangents_cap_the_bound() -> None:
    found = exact(nn.Sequential(linear(1.0), CotangentClip(0.1), linear(5.0)))
    assert cotangents(found)["_0"] == close(0.1, rel=1e-9)
    beside = exact(
        Graph(
            lambda m, x: (lambda y: m.b(m.clip(y)) + y)(m.a(x)), a=linear(1.0), b=linear(5.0), clip=CotangentClip(0.1)
        )
    )
    assert cotangents(beside)["a"] == close(0.1 + ROOT2, rel=1e-9)


def test_a_dead_branch_has_sensitivity_zero_and_a_layer_never_called_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.dead(x)
        return m.alive(x)

    found = exact(Graph(forward, dead=linear(1.0, 1.0), alive=linear(1.0)))
    assert delta(found, "dead") == 0.0 and delta(found, "alive") > 0
    with pytest.raises(CertificationError, match=r"unused\.weight.*no bound"):
        exact(Graph(lambda m, x: m.alive(x), unused=linear(1.0), alive=linear(1.0)))


def test_frozen_parameters_have_no_group_and_frozen_weights_no_factor() -> None:
    model = nn.Sequential(linear(2.0, 0.5), linear(1.0, 0.5))
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    found = exact(model)
    assert [g.parameters for g in found.groups] == [("1.bias",)]
    assert found.groups[0].worst_case == close(ROOT2, rel=1e-9)


def test_the_certificate_follows_the_weights_and_the_buffers() -> None:
    model = Graph(lambda m, x: m.layer(x * m.mask), layer=linear(1.0), mask=torch.ones(2)).double()
    certifier = Certifier(model, (2,), 1.0, "cross_entropy", compute_dtype=torch.float64)
    assert certifier.certify().group("layer").worst_case == close(ROOT2, rel=1e-9)
    model.mask = 10.0 * torch.ones(2, dtype=torch.float64)  # a new tensor, as .to(device) makes it
    assert certifier.certify().group("layer").worst_case == close(10 * ROOT2, rel=1e-9)
    with torch.no_grad():
        model.layer.weight.mul_(3.0)
    assert certifier.certify().node("layer").forward == close(30.0, rel=1e-9)


def bfloat16_ratios(norms_rounded: bool, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Outputs over their bounds where bfloat16 rounds every weight and every input up by nearly 2^-8."""
    if not norms_rounded:
        monkeypatch.setattr("lipdp_lightning.bounds.certifier.RoundedNorms", lambda source: source)
    size, up = 64, 1 + 2.0**-8 + 2.0**-12
    model = make_private(nn.Sequential(nn.Linear(size, size, bias=False), nn.Linear(size, 1, bias=False)))
    with torch.no_grad():
        model[0].weight.fill_(up / size)
        model[1].weight.fill_(up / math.sqrt(size))
    found = certify(model, (size,), up, "huber", compute_dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        first = model[0](torch.full((1, size), up / math.sqrt(size)))
        second = model[1](first)
    return [float(v.double().norm()) / found.node(n).forward for v, n in ((first, "_0"), (second, "_1"))]


def test_bfloat16_certificates_hold_for_the_weights_as_they_are_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(bfloat16_ratios(True, monkeypatch)) <= 1.0


def test_bfloat16_rounds_more_than_once_per_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """One margin of 2^-8 for an operation does not cover its weight, its operand and its result."""
    monkeypatch.setitem(OPERATION_MARGIN, torch.bfloat16, 2.0**-8)
    assert max(bfloat16_ratios(False, monkeypatch)) > 1.003


def test_rounding_a_weight_is_no_relative_change_of_its_norm() -> None:
    """A Hadamard matrix whose entries all round up by 2^-8: the rounding has norm 1, and the matrix only 16."""
    signs = torch.ones(1, 1)
    for _ in range(4):
        signs = torch.kron(signs, torch.ones(4, 4) - 2 * torch.eye(4))
    weight = torch.where(signs > 0, 1 + 2.0**-8 + 2.0**-12, -1 - 2.0**-8 + 2.0**-12)
    exact_norm, cast_norm = dense_norm(weight), dense_norm(weight.to(torch.bfloat16))
    assert cast_norm > exact_norm * (1 + 10 * 2.0**-8)
    assert RoundedNorms(NormSource()).operator_norm("weight", weight, Dense()) >= cast_norm
