"""Every certificate that is known to be false is caught by the attack or by the check of single rules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipdp_lightning.audit import AttackReport, attack, rule_ratios
from lipdp_lightning.bounds import backward, certify
from lipdp_lightning.bounds.certificate import GroupBound
from lipdp_lightning.bounds.losses import CrossEntropy, Huber
from lipdp_lightning.bounds.registry import _RULES, Bound, NormSource, Operation, Value
from lipdp_lightning.layers import ScaledLinear, make_private
from lipdp_lightning.layers.nonlinearities import floored_normalization
from lipdp_lightning.norms import conv, dense

Case = tuple[nn.Module, tuple[int, ...]]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def attacked(model: nn.Module, shape: tuple[int, ...], loss: Any = None, **options: Any) -> AttackReport:
    return attack(make_private(model), shape, 1.0, loss or Huber(), **{"restarts": 16, "steps": 16, **options})


def assigned(layer: nn.Module, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    with torch.no_grad():
        layer.weight.copy_(weight.reshape(layer.weight.shape))
        if layer.bias is not None:
            layer.bias.copy_(torch.zeros_like(layer.bias) if bias is None else bias)
    return layer


def caught(model: nn.Module, shape: tuple[int, ...], loss: Any = None) -> float:
    """The largest ratio that the attack or the check of single rules finds."""
    report = attacked(model, shape, loss)
    inputs = torch.stack([x for x, _ in list(report.witnesses.values())[:4]])
    rules = rule_ratios(make_private(model), shape, 1.0, loss or Huber(), inputs)
    return max(report.worst.ratio, *(r.worst for r in rules))


def assert_caught(
    monkeypatch: pytest.MonkeyPatch,
    case: Callable[[], Case],
    broken: Callable[[pytest.MonkeyPatch], None],
    loss: Any = None,
) -> None:
    """Sound as it is; false, and seen to be false, once broken."""
    torch.manual_seed(0)
    assert caught(*case(), loss) <= 1 + 1e-5
    broken(monkeypatch)
    torch.manual_seed(0)
    assert caught(*case(), loss) > 1 + 1e-3


def replaced(*kinds: type, **changes: Callable[[Bound, Value, Operation], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """A rule with parts of its answer changed."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for kind in kinds:
            original = _RULES[kind]

            def broken(op: Operation, x: Value, original: Any = original) -> Bound:
                bound = original(op, x)
                return dataclasses.replace(bound, **{k: f(bound, x, op) for k, f in changes.items()})

            monkeypatch.setitem(_RULES, kind, broken)

    return patch


def patched(target: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(target, name, value)


def power_iteration(weight: Tensor, **_: Any) -> float:
    """Three steps from the vector of ones: a lower bound."""
    vector = torch.ones(weight.shape[1], dtype=torch.float64)
    matrix = weight.detach().double()
    for _ in range(3):
        vector = matrix.T @ (matrix @ (vector / vector.norm()))
    return float((matrix @ (vector / vector.norm())).norm())


def two_linears() -> Case:
    # singular values close to each other, and the start nearly orthogonal to the largest one's vector
    weight = torch.tensor([[1.0, -1.0], [0.9, 0.9]]) @ torch.diag(torch.tensor([1.0, 1.0]))
    return nn.Sequential(nn.Linear(2, 2, bias=False), assigned(nn.Linear(2, 2, bias=False), weight)), (2,)


def test_power_iteration_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(monkeypatch, two_linears, patched(dense, "dense_norm", power_iteration))


def own_size_torus(kernel: Tensor, *, input_size: Any, **_: Any) -> float:
    """Largest singular value of the symbol on the torus of the bare image."""
    spectrum = torch.fft.fft(kernel.detach().double(), n=input_size[0], dim=2).permute(2, 0, 1)
    return float(torch.linalg.matrix_norm(spectrum, 2).max())


def test_a_torus_of_the_images_own_size_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def case() -> Case:
        layer = assigned(nn.Conv1d(1, 1, 3, padding=1, bias=False), torch.tensor([1.0, -1.0, 1.0]))
        return nn.Sequential(nn.Conv1d(1, 1, 1, bias=False), layer, nn.Flatten()), (1, 3)

    assert_caught(monkeypatch, case, patched(conv, "conv_norm", own_size_torus))


def convolution() -> Case:
    layer = assigned(nn.Conv2d(1, 1, 3, padding=1, bias=False), torch.ones(9) / 9)
    return nn.Sequential(layer, nn.Flatten()), (1, 6, 6)


def test_kappa_left_out_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(monkeypatch, convolution, patched(conv, "kappa", lambda *a, **k: 1.0))


def test_the_reshaped_kernels_norm_without_kappa_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def reshaped(kernel: Tensor, **_: Any) -> float:
        return float(torch.linalg.matrix_norm(kernel.detach().double().flatten(1), 2))

    assert_caught(monkeypatch, convolution, patched(conv, "conv_norm", reshaped))


def biased() -> Case:
    return nn.Sequential(assigned(nn.Linear(3, 3), torch.eye(3), torch.ones(3)), nn.Linear(3, 2)), (3,)


def test_the_bias_left_out_of_the_forward_bound_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(monkeypatch, biased, patched(NormSource, "vector_norm", lambda self, vector: 0.0))


def test_the_bias_left_out_of_the_gradient_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(bound: Bound, x: Value, op: Operation) -> Any:
        return tuple(dataclasses.replace(u, gradient_factor=x.norm) for u in bound.uses)

    assert_caught(monkeypatch, biased, replaced(ScaledLinear, uses=without))


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class CentredBackward(torch.autograd.Function):
    """The identity whose backward centres the cotangents over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # type: ignore[override]
        return cotangent - cotangent.mean(0, keepdim=True)


class CentresCotangents(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return CentredBackward.apply(x)


@pytest.mark.parametrize("kind", [Centred, CentresCotangents])
def test_batch_centring_under_the_rule_of_the_identity_is_caught(
    monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module]
) -> None:
    monkeypatch.setitem(_RULES, kind, lambda op, x: Bound(x.norm, 1.0))
    report = attacked(nn.Sequential(nn.Linear(3, 3), kind(), nn.Linear(3, 2)), (3,), steps=4)
    assert report.interaction > 0
    assert report.violations()[0].claim == "examples kept apart"
    assert attacked(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), (3,), steps=4).interaction == 0.0


class Graph(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


@pytest.mark.parametrize(
    "function",
    [lambda m, x: (lambda y: y + y)(m.stem(x)), lambda m, x: (lambda y: torch.cat([y, y], 1))(m.stem(x))],
    ids=["y + y", "cat([y, y])"],
)
def test_users_in_place_of_slots_are_caught(
    monkeypatch: pytest.MonkeyPatch, function: Callable[[Any, Tensor], Tensor]
) -> None:
    def case() -> Case:
        return Graph(function, stem=nn.Linear(3, 2)), (3,)

    assert_caught(monkeypatch, case, patched(backward, "_gain", lambda bound, slots: max(slots)))


def test_root_of_squares_for_a_reused_layer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def case() -> Case:
        layer = assigned(nn.Linear(1, 1, bias=False), torch.tensor([0.75]))
        return nn.Sequential(layer, layer), (1,)

    def root(group: GroupBound) -> float:
        return math.hypot(*(u.cotangent_bound * u.gradient_factor for u in group.uses))

    def root_layerwise(group: GroupBound) -> float:
        return math.hypot(*(u.cotangent_bound for u in group.uses))

    assert_caught(monkeypatch, case, patched(GroupBound, "worst_case", property(root)))
    monkeypatch.undo()
    twice = lambda: (Graph(lambda m, x: m.layer(x) + m.layer(x), layer=nn.Linear(2, 2)), (2,))  # noqa: E731
    assert_caught(monkeypatch, twice, patched(GroupBound, "layerwise", property(root_layerwise)))


def test_the_thesis_cotangent_bound_with_the_layers_own_norm_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thesis Algorithm 8 line 5 multiplies from i = k; a layer of norm 0.2 has its own gradient divided by 5."""

    def case() -> Case:
        return nn.Sequential(assigned(nn.Linear(2, 2), 0.2 * torch.eye(2))), (2,)

    def algorithm_8(group: GroupBound) -> float:
        return sum(u.cotangent_bound * u.lipschitz * u.input_bound for u in group.uses)

    broken = patched(GroupBound, "worst_case", property(algorithm_8))
    assert_caught(monkeypatch, case, broken, CrossEntropy())
    model, shape = case()
    claimed = certify(make_private(model), shape, 1.0, CrossEntropy()).groups[0].worst_case
    assert claimed == pytest.approx(math.sqrt(2) * 0.2, rel=1e-5)  # 0.283
    reached = claimed * attacked(model, shape, CrossEntropy()).groups[0].worst_case
    assert reached == pytest.approx(2 * torch.sigmoid(torch.tensor(0.2 * math.sqrt(2))).item(), rel=1e-2)
    assert reached > 1.104 * 0.999


def test_a_sigmoid_bounded_by_its_slope_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def case() -> Case:
        return nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 2)), (3,)

    assert_caught(monkeypatch, case, replaced(nn.Sigmoid, norm=lambda bound, x, op: 0.25 * x.norm))


@pytest.mark.parametrize(
    "pool",
    [
        nn.AvgPool2d(2, 2, ceil_mode=True),
        nn.AvgPool2d(2, 2, padding=1, count_include_pad=False),
        nn.AvgPool2d(2, 2, divisor_override=1),
    ],
    ids=["ceil_mode", "count_include_pad", "divisor_override"],
)
def test_the_average_pools_closed_form_is_caught(monkeypatch: pytest.MonkeyPatch, pool: nn.AvgPool2d) -> None:
    def case() -> Case:
        return nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), pool, nn.Flatten()), (1, 3, 3)

    def closed_form(bound: Bound, x: Value, op: Operation) -> float:
        return math.ceil(2 / 2) / 2.0  # sqrt(overlap) / sqrt(window)

    broken = replaced(nn.AvgPool2d, lipschitz=closed_form, norm=lambda b, x, op: x.norm * closed_form(b, x, op))
    assert_caught(monkeypatch, case, broken)


def test_a_max_pools_overlap_left_out_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def case() -> Case:
        return nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.MaxPool2d(3, 1, 1), nn.Flatten()), (1, 4, 4)

    assert_caught(monkeypatch, case, replaced(nn.MaxPool2d, lipschitz=lambda *_: 1.0, norm=lambda b, x, op: x.norm))


class RootNorm(nn.Module):
    """Layer normalisation with eps inside the root: its divisor is at least sqrt(eps), not eps."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[1:], eps=self.eps)


@pytest.mark.parametrize(
    ("eps", "claimed_floor"), [(4.0, lambda eps: eps), (1e-2, lambda eps: 1.0)], ids=["eps as floor", "slope 1"]
)
def test_eps_inside_the_root_taken_for_a_floor_is_caught(
    monkeypatch: pytest.MonkeyPatch, eps: float, claimed_floor: Callable[[float], float]
) -> None:
    def case() -> Case:
        return nn.Sequential(nn.Linear(4, 4, bias=False), RootNorm(eps), nn.Linear(4, 1, bias=False)), (4,)

    # 1 / sqrt(eps) is sound, though useless at the usual 1e-5
    monkeypatch.setitem(_RULES, RootNorm, lambda op, x: floored_normalization(x, math.sqrt(eps)))
    assert_caught(
        monkeypatch, case,
        lambda m: m.setitem(_RULES, RootNorm, lambda op, x: floored_normalization(x, claimed_floor(eps))),
    )  # fmt: skip


def test_a_false_loss_constant_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def case() -> Case:
        return nn.Sequential(assigned(nn.Linear(2, 2), 20 * torch.eye(2))), (2,)

    assert_caught(monkeypatch, case, patched(CrossEntropy, "lipschitz", lambda self, shape: 1.0), CrossEntropy())
