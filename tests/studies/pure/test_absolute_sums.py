"""Bounds in l1 and in the largest entry, attacked over inputs and labels; broken bounds fail the same attack."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from lipdp_lightning.bounds.losses import BinaryCrossEntropy, CrossEntropy, Huber, Loss, SquaredError
from lipdp_lightning.studies.pure import absolute_sums
from lipdp_lightning.studies.pure.absolute_sums import (
    Sizes,
    absolute_bounds,
    into_box_and_l1_ball,
    operator_sums,
    per_example_sizes,
)

INPUTS = Sizes(3.0, 1.0)


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3, bias=False))


def convolutional() -> nn.Sequential:
    first, second = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 2, 3, stride=2, bias=False)
    return nn.Sequential(first, nn.ReLU(), second, nn.Flatten(), nn.Linear(8, 3))


def one_column() -> nn.Sequential:
    """Weights whose sums of rows and of columns are far apart: all of one layer's inputs lead to one output."""
    network = nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 2))
    with torch.no_grad():
        network[0].weight.zero_()[0] = 1.0
        network[2].weight.zero_()[:, 0] = 1.0
    return network


def one_row() -> nn.Sequential:
    network = one_column()
    with torch.no_grad():
        network[0].weight.zero_()[:, 0] = 1.0
        network[2].weight.zero_()[0] = 1.0
        network[2].weight[1] = -1.0
    return network


CASES: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "dense": (dense, (6,)), "convolutional": (convolutional, (1, 6, 6)), "one column": (one_column, (6,)),
    "one row": (one_row, (6,)),
}  # fmt: skip


def worst_ratio(name: str, loss: Loss, labels: int, seed: int = 0, rounds: int = 40) -> float:
    """The largest ratio of measured to certified over layers, norms, inputs and labels, after gradient ascent."""
    build, shape = CASES[name]
    torch.manual_seed(seed)
    network = build().double()
    bounds = absolute_bounds(network, shape, INPUTS, loss)
    weights = {n: p.detach() for n, p in network.named_parameters()}

    def of_one(parameters: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
        return loss.per_example(functional_call(network, parameters, row[None]), label[None])[0]

    numel = int(torch.tensor(shape).prod())
    starts = torch.cat([torch.eye(numel).reshape(-1, *shape), torch.ones(1, *shape), torch.randn(30, *shape)]).double()
    worst = 0.0
    for label in range(labels):
        inputs = into_box_and_l1_ball(torch.cat([3 * starts, -3 * starts]), INPUTS)
        goal = torch.full((len(inputs),), label)
        goal = goal if isinstance(loss, CrossEntropy) else 100.0 * (2 * goal - 1)[:, None].double().expand(-1, 3)
        goal = (goal > 0).double() if isinstance(loss, BinaryCrossEntropy) else goal
        for _ in range(rounds):
            inputs.requires_grad_()
            gradients = vmap(grad(of_one), (None, 0, 0))(weights, inputs, goal)
            ratios = []
            for bound in bounds:
                own = [g for n, g in gradients.items() if n.startswith(f"{bound.name}.")]
                ratios.append(
                    per_example_sizes(own) / torch.tensor([bound.sizes.total, bound.sizes.largest], dtype=torch.float64)
                )
            worst = max(worst, *(float(r.detach().max()) for r in ratios))
            (slope,) = torch.autograd.grad(torch.stack(ratios).sum(), inputs)
            inputs = into_box_and_l1_ball(inputs.detach() + 0.3 * slope.sign(), INPUTS)
            rounds = max(1, rounds - 1)
    return worst


LOSSES: dict[str, tuple[Loss, int]] = {
    "cross-entropy": (CrossEntropy(), 2), "temperature": (CrossEntropy(temperature=0.3), 2), "huber": (Huber(0.5), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("loss", LOSSES)
def test_no_example_exceeds_its_bounds(name: str, loss: str) -> None:
    if loss == "huber" and name in ("one column", "one row"):
        pytest.skip("two outputs")
    assert worst_ratio(name, *LOSSES[loss]) <= 1


def test_the_bound_of_one_layer_is_attained() -> None:
    """One hot input of the largest sum allowed, and a label that the network is sure not to be."""
    network = nn.Sequential(nn.Linear(3, 2, bias=False)).double()
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor([[50.0, 0, 0], [-50.0, 0, 0]]))
    bound = absolute_bounds(network, (3,), Sizes(1.0, 1.0), CrossEntropy())[0]
    loss = CrossEntropy().per_example(network(torch.tensor([[1.0, 0, 0]], dtype=torch.float64)), torch.tensor([1]))
    (gradient,) = torch.autograd.grad(loss.sum(), network[0].weight)
    assert float(gradient.abs().sum()) == pytest.approx(bound.sizes.total, rel=1e-6)
    assert float(gradient.abs().max()) == pytest.approx(bound.sizes.largest, rel=1e-6)


@pytest.mark.parametrize("name", ["one column", "one row"])
def test_rows_and_columns_exchanged_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absolute_sums, "operator_sums", lambda layer: operator_sums(layer)[::-1])
    assert worst_ratio(name, CrossEntropy(temperature=0.05), 2) > 1.2


def test_a_forgotten_bias_and_a_constant_of_the_l2_norm_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = absolute_sums._gradient
    monkeypatch.setattr(
        absolute_sums, "_gradient", lambda layer, g, x: Sizes(g.total * x.total, kept(layer, g, x).largest)
    )
    assert worst_ratio("one row", CrossEntropy(temperature=0.05), 2) > 1.1
    monkeypatch.undo()
    monkeypatch.setattr(absolute_sums, "loss_sizes", lambda loss, shape: Sizes(2**0.5 / loss.temperature, 1.0))
    assert worst_ratio("one row", CrossEntropy(temperature=0.05), 2) > 1.2


def test_what_has_no_exact_sums_is_refused() -> None:
    for network, shape in (
        (nn.Sequential(nn.Sigmoid()), (3,)), (nn.Sequential(nn.Linear(3, 2)), (3,)),
        (nn.Sequential(nn.Conv2d(2, 2, 3, groups=2)).double(), (2, 5, 5)),
        (nn.Sequential(nn.Linear(3, 2)).double(), (4, 3)),
        (nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")).double(), (2, 5, 5)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="HINT"):
            absolute_bounds(network, shape, INPUTS, CrossEntropy())
    for loss in (SquaredError(1.0, 1.0), CrossEntropy(class_weights=(1.0, 2.0))):
        with pytest.raises(ValueError, match="HINT"):
            absolute_bounds(nn.Sequential(nn.Linear(3, 2)).double(), (3,), INPUTS, loss)


def test_inputs_are_brought_within_their_sizes_and_nan_is_zero() -> None:
    rows = into_box_and_l1_ball(
        torch.tensor([[5.0, -5, 5], [float("nan"), float("inf"), 0.0], [0.1, 0.2, 0.3]]), Sizes(2.0, 1.0)
    )
    assert float(rows.abs().max()) <= 1 and float(rows.abs().sum(1).max()) <= 2 + 1e-12
    assert rows[1].tolist() == [0.0, 1.0, 0.0] and torch.allclose(rows[2], torch.tensor([0.1, 0.2, 0.3]).double())
