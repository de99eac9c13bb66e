"""Loops that normalise rows: the values and gradients of torch's operations, more exactly, and of every order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lipdp_lightning.kernels.cpu import normalize
from lipdp_lightning.kernels.rows import floored_by_torch, floored_rows
from lipdp_lightning.layers import GroupNorm

FLOOR = 0.2
SHAPES = [(3, 4, 1), (3, 4, 7), (5, 1, 4096), (2, 16, 1000), (1, 1, 2)]


def groups(shape: tuple[int, ...]) -> Tensor:
    """Of all sizes of deviation, below the floor, near it and above it, away from zero."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    sizes = torch.logspace(-3, 3, shape[0] * shape[1]).reshape(*shape[:2], 1)
    return x * sizes + 3.0


def pulled_back(function: object, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    assert callable(function)
    leaf = x.clone().requires_grad_()
    out = function(leaf, FLOOR)
    return out.detach(), torch.autograd.grad(out, leaf, direction)[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_float64(shape: tuple[int, ...]) -> None:
    x = groups(shape)
    direction = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    exact_out, exact_back = pulled_back(floored_by_torch, x.double(), direction.double())
    out, back = pulled_back(floored_rows, x, direction)
    assert out.dtype == back.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact_out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(back.double(), exact_back, rtol=1e-5, atol=1e-6 / FLOOR)


def test_the_loops_are_what_a_network_in_float32_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(type(normalize), "__call__", lambda self, *arguments: used.append(1))
    layer = GroupNorm(2, 4)
    for x in (torch.randn(3, 4, 5), torch.randn(3, 4, 5, requires_grad=True)):
        layer(x)
    assert len(used) == 2
    for other in (torch.randn(3, 4, 5).double(), torch.zeros(0, 4, 5), torch.zeros(3, 4, 0)):
        layer(other)
    assert len(used) == 2


def test_gradients_of_gradients_are_those_of_torchs_operations() -> None:
    """Attacks on a certificate ascend on norms of gradients."""
    x, weight = groups((4, 3, 6)), torch.randn(4, 3, 6)

    def ascent(function: object) -> Tensor:
        assert callable(function)
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad((function(leaf, FLOOR) * weight).sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaf)[0]

    torch.testing.assert_close(ascent(floored_rows), ascent(floored_by_torch), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("deviation", [FLOOR * (1 - 1e-5), FLOOR * (1 + 1e-5), 1e-3, 50.0])
def test_the_slope_is_at_most_that_of_the_certificate(deviation: float) -> None:
    row = torch.randn(16, generator=torch.Generator().manual_seed(0))
    x = (row - row.mean()) / row.std(unbiased=False) * deviation + 1.0
    jacobian = torch.autograd.functional.jacobian(lambda z: floored_rows(z[None, None], FLOOR)[0, 0], x)
    slope = float(torch.linalg.matrix_norm(jacobian.double(), 2))
    assert slope <= (1.0 + 1e-5) / FLOOR
    assert slope == pytest.approx(1.0 / max(FLOOR, deviation), rel=1e-4)


def test_what_is_no_number_harms_its_own_group_alone() -> None:
    x = groups((3, 2, 8))
    x[1, 0, 3], x[2, 1, 0] = torch.nan, torch.inf
    out, back = pulled_back(floored_rows, x, torch.ones(3, 2, 8))
    bad = torch.tensor([[False, False], [True, False], [False, True]])
    assert torch.equal(torch.isnan(out).all(2), bad) and torch.equal(torch.isnan(out).any(2), bad)
    assert torch.equal(torch.isnan(back).any(2), bad)


def test_an_output_may_be_overwritten() -> None:
    """As by an activation in place."""
    x = groups((4, 2, 9))
    direction = torch.randn(4, 2, 9)
    leaf = x.clone().requires_grad_()
    out = floored_rows(leaf, FLOOR)
    found = torch.autograd.grad(torch.relu_(out), leaf, direction)[0]
    assert torch.equal(found, pulled_back(lambda z, floor: floored_rows(z, floor).relu(), x, direction)[1])


def test_threads_change_nothing() -> None:
    x = groups((64, 8, 700))
    direction, before = torch.randn(64, 8, 700), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(pulled_back(floored_rows, x, direction))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(results[0], result, strict=True))


def test_gradients_per_example_of_torch_func() -> None:
    layer, x = GroupNorm(2, 4, FLOOR), torch.randn(5, 4, 3)
    found = torch.func.vmap(torch.func.grad(lambda row: layer(row[None]).square().sum()))(x)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(layer(leaf).square().sum(), leaf)[0], rtol=1e-4, atol=1e-4)
