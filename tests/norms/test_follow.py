"""Norms that are followed: bounds stay above the truth along any path, whatever is asked, in whatever order."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lipdp_lightning.bounds.certifier import Certifier
from lipdp_lightning.bounds.losses import CrossEntropy
from lipdp_lightning.norms import Convolution, Dense, Follower, Operator, conv_norm, dense_norm
from lipdp_lightning.norms import follow as room
from lipdp_lightning.norms.strips import Change

SIZE = 4
CONV = Convolution(padding=1, input_size=(SIZE, SIZE))
TOO_LOW = 1 - 1e-9


class Counting(Operator):
    """Counts how often the norm of an operator is evaluated; it is never cheap."""

    def __init__(self, operator: Operator | None = None) -> None:
        self.calls, self.operator = 0, operator or Dense()

    def norm(self, weight: Tensor, name: str = "weight") -> float:
        self.calls += 1
        return self.operator.norm(weight, name)

    def deviation_factor(self, weight: Tensor) -> float:
        return self.operator.deviation_factor(weight)


class WithoutKappa(Convolution):
    def deviation_factor(self, weight: Tensor) -> float:
        return 1.0


def dense_truth(weight: Tensor) -> float:
    return float(torch.linalg.svdvals(weight.detach().double())[0])


def conv_truth(kernel: Tensor, groups: int = 1) -> float:
    inputs = kernel.shape[1] * groups
    layer = nn.Conv2d(inputs, kernel.shape[0], 3, padding=1, bias=False, groups=groups).double()
    layer.weight.data.copy_(kernel)
    count = inputs * SIZE**2
    with torch.no_grad():
        operator = layer(torch.eye(count, dtype=torch.float64).reshape(count, inputs, SIZE, SIZE)).flatten(1)
    return float(torch.linalg.svdvals(operator)[0])


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def asked(follower: Follower, weight: Tensor, operator: Operator, name: str = "w") -> float:
    """The bound of one walk that asks about one weight."""
    follower.begin()
    return follower.operator_norm(name, weight, operator)


# ---- between exact norms


def constant_direction(operator: Convolution, slack: float, large: bool) -> float:
    """Smallest bound / truth while a kernel grows along the constant kernel, the worst direction for kappa."""
    side = 18 if large else 1
    kernel = torch.zeros(side, side, 3, 3)
    kernel[:, :, 1, 1] = 1.0 / side
    follower, ratios = Follower(slack), []
    asked(follower, kernel, operator)
    for step in range(20):
        kernel.add_(0.01 / side)
        kernel.add_(0.003 * noise(*kernel.shape, seed=step) / side)  # which makes the follower look closer
        ratios.append(asked(follower, kernel, operator) / conv_truth(kernel))
    return min(ratios)


@pytest.mark.parametrize("slack", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("large", [False, True])
def test_growing_kernel_never_below_the_truth(slack: float, large: bool) -> None:
    assert constant_direction(CONV, slack, large) >= TOO_LOW


@pytest.mark.parametrize("large", [False, True])
def test_following_a_kernel_without_kappa_fails_the_same_check(large: bool) -> None:
    assert constant_direction(WithoutKappa(padding=1, input_size=(SIZE, SIZE)), 0.5, large) < 1.0 - 1e-2


def growth(weight: Tensor, direction: Tensor, steps: int = 40) -> float:
    """Smallest bound / truth while a weight moves in one direction, with a little noise."""
    follower, ratios, operator = Follower(0.5), [], Counting()
    asked(follower, weight, operator)
    for step in range(steps):
        weight.add_(direction).add_(1e-4 * noise(*weight.shape, seed=step))
        ratios.append(asked(follower, weight, operator) / dense_truth(weight))
    assert operator.calls < steps
    return min(ratios)


def paths() -> Iterator[tuple[Tensor, Tensor]]:
    """From a matrix of rank one: along it, along another one, in one strip alone, and along a row and a column."""
    for rows, columns in ((64, 128), (128, 64), (20, 300)):
        start = noise(rows, 1, seed=1) @ noise(1, columns, seed=2)
        start = start / dense_truth(start)
        other = noise(rows, 1, seed=3) @ noise(1, columns, seed=4)
        strip, row, column = torch.zeros(3, rows, columns)
        strip[:16] = start[:16] / dense_truth(start[:16])
        row[-1], column[:, -1] = 1.0 / math.sqrt(columns), 1.0 / math.sqrt(rows)
        for direction in (start, other / dense_truth(other), strip, row, column):
            yield start.clone(), 0.05 * direction


def test_growing_matrix_never_below_the_truth() -> None:
    assert min(growth(*path) for path in paths()) >= 1 - 1e-7


def test_a_change_bounded_from_below_fails_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by power iteration, stopped early."""

    def lower(pairs: Any, height: int = 8, vectors: Any = ()) -> tuple[list[Change], list[float]]:
        moved = [(w - r.factor * r.values).flatten(1) for w, r in pairs]
        return [Change(float(m.sum(1).norm()) / math.sqrt(m.shape[1]), float(m.norm())) for m in moved], []

    monkeypatch.setattr(room, "changes", lower)
    assert min(growth(*path) for path in paths()) < 1 - 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_random_walk_with_clipping_never_below_the_truth(dtype: torch.dtype) -> None:
    weights = {"dense": noise(30, 50).to(dtype), "conv": noise(6, 4, 3, 3).to(dtype), "grouped": noise(6, 2, 3, 3)}
    grouped = Convolution(padding=1, groups=3, input_size=(SIZE, SIZE))
    operators: dict[str, Operator] = {"dense": Dense(), "conv": CONV, "grouped": grouped}
    truths: dict[str, Callable[[Tensor], float]] = {
        "dense": dense_truth, "conv": lambda k: conv_truth(k.double()), "grouped": lambda k: conv_truth(k.double(), 3)
    }  # fmt: skip
    limits, follower = {"dense": 1.0, "conv": 0.5}, Follower(0.2)
    for step in range(40):
        follower.begin()
        for name, weight in weights.items():
            bound = follower.operator_norm(name, weight, operators[name])
            truth = truths[name](weight)
            # a convolution's exact norm is at most 1.25 high (test_conv.py)
            assert truth * (1 - 1e-12) <= bound <= truth * 1.25 * 1.2 * (1.15 if dtype == torch.bfloat16 else 1.01)
        for name, limit in limits.items():
            follower.clip_({name: limit})
            assert truths[name](weights[name]) * (1 - 1e-12) <= follower.bound(name) <= limit
        for name, weight in weights.items():
            weight.add_(((1e-2 if name == "grouped" else 2e-3) * noise(*weight.shape, seed=step)).to(weight.dtype))


def test_evaluated_again_only_where_a_weight_moved_beyond_the_slack() -> None:
    weights, operators = [torch.eye(4) for _ in range(5)], [Counting() for _ in range(5)]
    follower = Follower(0.05)

    def walk() -> list[float]:
        follower.begin()
        return [follower.operator_norm(f"{i}", *pair) for i, pair in enumerate(zip(weights, operators, strict=True))]

    walk()
    weights[3].mul_(2.0)
    weights[1][0, 0] += 0.01
    bounds = walk()
    assert [operator.calls for operator in operators] == [1, 1, 1, 2, 1]
    assert bounds == pytest.approx([1.0, 1.01, 1.0, 2.0, 1.0], rel=1e-5)


def test_fewer_exact_norms_for_changes_that_resemble_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for by_strips in (False, True):
        weight, operator, follower = noise(128, 256), Counting(), Follower(0.1)
        if not by_strips:
            monkeypatch.setattr(room, "changes", in_frobenius_norm)
        for step in range(60):
            weight.add_(0.0075 * noise(128, 256, seed=step))
            assert dense_truth(weight) <= asked(follower, weight, operator) <= 1.13 * dense_truth(weight)
        monkeypatch.undo()
        counts.append(operator.calls)
    assert counts[1] * 3 < counts[0]


def in_frobenius_norm(pairs: Any, vectors: Any = ()) -> tuple[list[Change], list[float]]:
    sizes = [float((w - r.factor * r.values).double().norm()) * (1 + 1e-6) for w, r in pairs]
    return [Change(size, size) for size in sizes], []


def test_cheap_norms_are_taken_anew_and_keep_no_copy() -> None:
    weight, follower = noise(10, 64), Follower()
    for step in range(5):
        weight.add_(0.01 * noise(10, 64, seed=step))
        assert asked(follower, weight, Dense()) == dense_norm(weight)
    assert follower.state()["anchors"] == {}


# ---- what a weight may be


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("operator", [Dense(), CONV])
def test_non_finite_weights_are_refused_by_name(value: float, operator: Operator) -> None:
    weight, follower = noise(20, 30) if isinstance(operator, Dense) else noise(4, 4, 3, 3), Follower(1e9)
    asked(follower, weight, operator, "head.weight")
    weight.view(-1)[3] = value
    with pytest.raises(ValueError, match=r"(?s)head\.weight.*HINT"):
        asked(follower, weight, operator, "head.weight")


def test_a_norm_that_is_no_number_is_refused() -> None:
    class Broken(Dense):
        def norm(self, weight: Tensor, name: str = "weight") -> float:
            return math.nan

    with pytest.raises(ValueError, match=r"(?s)w: .*nan.*HINT"):
        asked(Follower(), torch.eye(20), Broken())


@pytest.mark.parametrize("large", [False, True])
def test_zero_weights_have_norm_zero_and_may_grow(large: bool) -> None:
    side = 40 if large else 4
    weight, follower = torch.zeros(side, side), Follower()
    assert asked(follower, weight, Dense()) == asked(follower, weight, Dense()) == 0.0
    weight.fill_(1e-30)  # squared in float32 it is zero
    assert asked(follower, weight, Dense()) >= side * 1e-30
    weight.fill_(1.0)
    assert side * TOO_LOW <= asked(follower, weight, Dense()) <= side * 1.1


def test_huge_changes_are_evaluated() -> None:
    weight, follower = torch.eye(20), Follower()
    for factor in (1e25, 1e-38, 1e30):
        asked(follower, weight, Dense())
        weight.mul_(factor)
        assert dense_truth(weight) * TOO_LOW <= asked(follower, weight, Dense()) <= dense_truth(weight) * 1.001


def test_weights_that_are_not_contiguous_are_followed_by_position() -> None:
    kernel = noise(20, 20, 3, 3).contiguous(memory_format=torch.channels_last)
    matrix, follower = noise(30, 20).mT, Follower()
    for step in range(5):
        assert conv_truth(kernel) * TOO_LOW <= asked(follower, kernel, CONV, "kernel")
        assert dense_truth(matrix) * TOO_LOW <= asked(follower, matrix, Dense(), "matrix")
        kernel.add_(1e-3 * noise(20, 20, 3, 3, seed=step))
        matrix.add_(1e-3 * noise(20, 30, seed=step))
    assert kernel.is_contiguous(memory_format=torch.channels_last) and not matrix.is_contiguous()


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_write_that_leaves_no_trace_is_noticed(factor: float) -> None:
    """``.data`` does not count versions."""
    layer, follower = nn.Linear(20, 20, bias=False), Follower()
    asked(follower, layer.weight, Dense())
    follower.clip_({"w": 0.5})
    version = layer.weight._version
    layer.weight.data.mul_(factor)
    assert layer.weight._version == version
    assert asked(follower, layer.weight, Dense()) >= dense_truth(layer.weight)


def test_weights_that_change_dtype_or_shape_are_evaluated() -> None:
    layer, follower, operator = nn.Linear(20, 20), Follower(1e9), Counting()
    asked(follower, layer.weight, operator)
    layer.double()
    layer.weight.data.mul_(3.0)
    assert asked(follower, layer.weight, operator) == pytest.approx(dense_truth(layer.weight)) and operator.calls == 2
    assert asked(follower, torch.eye(30), operator) == pytest.approx(1.0) and operator.calls == 3


# ---- what may be asked


def test_another_tensor_under_the_same_name_is_measured_itself() -> None:
    first, second, follower = torch.eye(20), 5.0 * torch.eye(20), Follower(1e9)
    asked(follower, first, Dense())
    assert asked(follower, second, Dense()) >= 5.0 * TOO_LOW
    assert follower.operator_norm("w", first, Dense()) >= TOO_LOW  # within one walk, too
    assert follower.operator_norm("w", second, Dense()) >= 5.0 * TOO_LOW


def test_the_order_of_requests_means_nothing() -> None:
    weights = {name: size * torch.eye(20) for name, size in (("a", 1.0), ("b", 7.0), ("c", 3.0))}
    follower = Follower()
    for names in ("abc", "cba", "bac", "ac", "b", "bbaac"):
        follower.begin()
        for name in names:
            size = float(weights[name][0, 0])
            bound = follower.operator_norm(name, weights[name], Dense())
            assert size * TOO_LOW <= bound <= size * 1.11
            weights[name].mul_(1.0 if names.count(name) > 1 else 1.02)


def test_a_weight_that_nothing_asks_about_any_more_is_not_evaluated() -> None:
    """A layer that was replaced because it held a NaN must not stop the run."""
    gone, follower = torch.eye(20), Follower()
    asked(follower, gone, Dense(), "gone")
    gone[0, 0] = math.nan
    assert asked(follower, torch.eye(20), Dense(), "here") >= TOO_LOW
    with pytest.raises(ValueError, match="gone"):
        follower.bound("gone")


def test_one_kernel_in_two_operators_has_two_norms_and_one_copy() -> None:
    kernel, follower = noise(20, 20, 3, 3), Follower()
    operators = [CONV, Convolution(stride=(2, 2), input_size=(SIZE, SIZE))]
    for step in range(8):
        follower.begin()
        for operator in operators if step % 2 else operators[::-1]:
            exact, bound = operator.norm(kernel), follower.operator_norm("w", kernel, operator)
            assert exact * (1 - 2e-3) <= bound <= exact * 1.11  # exact ones are 0.1 % apart
        follower.clip_({"w": 0.7})
        assert all(operator.norm(kernel) <= 0.7 * (1 + 1e-9) for operator in operators)
        kernel.add_(2e-3 * noise(20, 20, 3, 3, seed=step))
    assert list(follower.state()["anchors"]) == ["w"]


class Twice(nn.Module):
    """A layer used twice, and a tensor that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 20)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(torch.tanh(self.inner(self.inner(x))))))


def test_layers_used_twice_and_tied_weights_are_followed_once() -> None:
    torch.manual_seed(0)
    model, follower = Twice(), Follower()
    certifier = Certifier(model, (20,), 1.0, CrossEntropy(), norms=follower)
    for step in range(10):
        certificate = certifier.certify()
        for node in certificate.nodes:
            if node.operation in ("inner", "first", "second"):
                truth = dense_truth(model.get_submodule(node.operation).weight)
                assert truth * TOO_LOW <= node.lipschitz[0] <= truth * 1.11
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.003 * noise(*parameter.shape, seed=step))
    assert set(follower.state()["anchors"]) == {"inner.weight", "first.weight"}


def test_a_parameter_that_is_replaced_keeps_its_name_and_gets_its_own_norm() -> None:
    model, follower = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)), Follower(1e9)
    certifier = Certifier(model, (20,), 1.0, CrossEntropy(), norms=follower)
    certifier.certify()
    model[0].weight, model[1].weight = nn.Parameter(9.0 * torch.eye(20)), model[0].weight
    bounds = [node.lipschitz[0] for node in certifier.certify().nodes if node.lipschitz]
    assert bounds[0] >= 9.0 * TOO_LOW and bounds[1] >= dense_truth(model[1].weight) * TOO_LOW


def test_vectors_are_measured_anew_in_every_walk() -> None:
    first, second, follower = torch.ones(4), torch.tensor([3.0, 4.0], dtype=torch.float64), Follower()
    for size in (1.0, 2.0, 0.5):
        first.fill_(size)
        follower.begin()
        for vector, norm in ((second, 5.0), (first, 2.0 * size), (second, 5.0), (torch.zeros(3), 0.0)):
            assert norm <= follower.vector_norm(vector) <= norm * (1 + 1e-9)
    first[0] = math.nan
    follower.begin()
    assert math.isnan(follower.vector_norm(first))


def test_norms_of_vectors_do_not_depend_on_what_was_asked_before() -> None:
    """They are part of the key of a step's noise: an interrupted run must find the same bits."""
    vectors = [noise(count, seed=count) for count in (3, 100, 5000)]
    follower = Follower()
    alone = [Follower().vector_norm(vector) for vector in vectors]
    for asked_about in (vectors, vectors[:1], [], vectors[1:], vectors):
        follower.begin()
        follower.measure()
        assert [follower.vector_norm(vector) for vector in asked_about] == [
            alone[[v is vector for v in vectors].index(True)] for vector in asked_about
        ]


# ---- projections


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_clipping_stores_weights_within_the_limit(dtype: torch.dtype) -> None:
    weights = {"dense": noise(12, 20).to(dtype), "conv": noise(3, 2, 3, 3).to(dtype), "free": noise(20, 20).to(dtype)}
    operators = {"dense": Counting(), "conv": Counting(CONV), "free": Counting()}
    limits, before, follower = {"dense": 1.0, "conv": 0.5}, weights["free"].clone(), Follower(0.05)
    for step in range(30):
        follower.begin()
        for name, weight in weights.items():
            follower.operator_norm(name, weight, operators[name])
        for name, limit in limits.items():
            follower.clip_({name: limit})
            truth = dense_truth(weights[name]) if name == "dense" else conv_truth(weights[name].double())
            assert truth <= follower.bound(name) * (1 + 1e-12) <= limit * (1 + 1e-12)
            weights[name].add_((5e-3 * noise(*weights[name].shape, seed=step)).to(dtype))
    assert torch.equal(weights["free"], before) and operators["free"].calls == 1
    assert dtype == torch.bfloat16 or 1 < operators["dense"].calls < 20


def test_many_scalings_cost_no_accuracy_and_no_exact_norm() -> None:
    """A scaled reference is not rounded again and again."""
    weight, operator, follower = 2.0**10 * torch.linalg.qr(noise(20, 20)).Q, Counting(), Follower(0.05)
    asked(follower, weight, operator)
    for step in range(300):
        follower.clip_({"w": 1000.0 * 0.99**step})
        assert dense_truth(weight) <= asked(follower, weight, operator) <= dense_truth(weight) * (1 + 1e-4)
    assert operator.calls == 1


def test_a_limit_that_is_no_radius_is_refused() -> None:
    follower = Follower()
    asked(follower, torch.eye(20), Dense())
    for limit in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="HINT"):
            follower.clip_({"w": limit})
    for slack in (-0.1, math.nan):
        with pytest.raises(ValueError, match="HINT"):
            Follower(slack)


def test_a_norm_that_was_renewed_serves_the_next_walk() -> None:
    weight, operator, follower = noise(20, 20), Counting(), Follower()
    asked(follower, weight, operator)
    weight.copy_(torch.eye(20))
    follower.renew(["w"])
    assert follower.bound("w") == pytest.approx(1.0) and asked(follower, weight, operator) == pytest.approx(1.0)
    assert operator.calls == 2


class Named:
    """A state whose name is worked out when it is compared."""

    def __bytes__(self) -> bytes:
        return b"these"


def test_sealed_bounds_serve_the_sealed_weights_alone() -> None:
    weight, constant, follower = 3.0 * torch.eye(20), torch.eye(20), Follower(1e9)
    asked(follower, weight, Dense())
    follower.operator_norm("constant", constant, Dense())
    follower.clip_({"w": 1.0})
    follower.seal(b"these", {"w": weight})
    constant.mul_(4.0)  # no digest of the model's weights sees it
    follower.begin(b"these")
    assert follower.operator_norm("w", weight, Dense()) == 1.0
    assert follower.operator_norm("constant", constant, Dense()) >= 4.0 * TOO_LOW
    follower.seal(Named(), {"w": weight})
    follower.begin(b"these")
    assert follower.operator_norm("w", weight, Dense()) == 1.0
    weight.mul_(6.0)
    for digest in (b"others", b""):
        follower.begin(digest)
        assert follower.operator_norm("w", weight, Dense()) >= dense_truth(weight)


# ---- checkpoints


def walked(follower: Follower, weights: list[Tensor], seed: int) -> list[float]:
    found = []
    for step in range(15):
        follower.begin()
        for index, (weight, operator) in enumerate(zip(weights, (Dense(), CONV, Dense()), strict=True)):
            found.append(follower.operator_norm(f"{index}", weight, operator))
            follower.clip_({f"{index}": 2.0})
            found.append(follower.bound(f"{index}"))
            weight.add_(4e-3 * noise(*weight.shape, seed=100 * seed + step))
    return found


def test_a_saved_state_goes_on_with_the_same_bits_and_is_plain() -> None:
    weights = [noise(40, 60), noise(20, 20, 3, 3), noise(5, 30)]
    follower = Follower()
    walked(follower, weights, 1)
    file = io.BytesIO()
    torch.save({"follower": follower.state(), "weights": weights}, file)
    expected = walked(follower, weights, 2)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, others = Follower(), saved["weights"]
    for index, (weight, operator) in enumerate(zip(others, (Dense(), CONV, Dense()), strict=True)):
        again.operator_norm(f"{index}", weight, operator)
    again.load_state(saved["follower"])
    assert walked(again, others, 2) == expected
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_a_state_of_other_weights_or_of_none_changes_no_guarantee() -> None:
    follower, weight = Follower(), 5.0 * torch.eye(20)
    asked(follower, torch.eye(20), Dense())
    asked(follower, noise(4, 4, 3, 3), CONV, "kernel")
    follower.seal(b"these", {})
    other = Follower(1e9)
    asked(other, weight, Dense())
    for state in (follower.state(), None, {"tracker": [], "projected": None}):
        other.load_state(state)
        assert asked(other, weight, Dense()) >= 5.0 * TOO_LOW
    assert conv_norm(noise(4, 4, 3, 3), padding=1, input_size=SIZE) > 0
