"""Pairs of channels in order: the values and gradients of torch's operations, for a byte kept of each pair."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lipdp_lightning.kernels.rows import larger_first

SHAPES = [(5, 6), (0, 6), (3, 4, 7), (3, 4, 5, 6), (2, 2, 1), (2, 4, 0), (300, 128), (16, 32, 14, 14), (2, 4, 1, 1)]


def by_torch(x: Tensor) -> Tensor:
    first, second = torch.unflatten(x, 1, (-1, 2)).unbind(2)
    return torch.stack((torch.maximum(first, second), torch.minimum(first, second)), 2).flatten(1, 2)


def gradient(x: Tensor, out: Tensor, direction: Tensor) -> Tensor:
    return torch.autograd.grad(out, x, direction, create_graph=True)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_torchs_operations(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
    direction = torch.randn(shape).to(dtype)
    found, expected = larger_first(x), by_torch(x)
    assert torch.equal(found, expected) and found.dtype == dtype
    differ = torch.unflatten(x, 1, (-1, 2)).diff(dim=2).expand(-1, -1, 2, *shape[2:]).reshape(shape) != 0  # no ties
    difference = gradient(x, found, direction) - gradient(x, expected, direction)
    assert not bool(difference[differ].any())


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "every other example"])
def test_any_layout_is_read_by_position(layout: str) -> None:
    torch.manual_seed(0)
    x = {
        "transposed": torch.randn(6, 4, 8).transpose(0, 2),
        "channels_last": torch.randn(3, 4, 5, 6).contiguous(memory_format=torch.channels_last),
        "every other example": torch.randn(10, 4, 3)[::2],
    }[layout].requires_grad_()
    assert not x.is_contiguous()
    direction = torch.randn(x.shape)
    assert torch.equal(larger_first(x), by_torch(x))
    assert torch.equal(gradient(x, larger_first(x), direction), gradient(x, by_torch(x), direction))
    # and a gradient that is laid out in another way than the values
    straight = x.detach().contiguous().requires_grad_()
    assert torch.equal(
        gradient(straight, larger_first(straight), direction.mT.contiguous().mT), gradient(x, by_torch(x), direction)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 5)])
def test_the_gradient_is_a_permutation_even_at_ties(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """torch's operations would put half of both directions on each: a map that keeps no norms."""
    torch.manual_seed(0)
    x = torch.randint(-1, 2, shape).to(dtype).requires_grad_()
    assert bool((torch.unflatten(x, 1, (-1, 2)).diff(dim=2) == 0).any()), "no tie"
    direction = torch.randn(shape, dtype=dtype)
    out = larger_first(x)
    back = gradient(x, out, direction)
    assert torch.equal(back.flatten().sort().values, direction.flatten().sort().values)
    # the same permutation as that of the values
    torch.testing.assert_close((back * x).double().sum(), (direction * out).double().sum())


def test_gradients_of_gradients_are_those_of_the_permutation() -> None:
    """Attacks on a certificate ascend on norms of gradients."""
    torch.manual_seed(0)
    x, y = (torch.randn(4, 6, 5, requires_grad=True) for _ in range(2))

    def value(function: object) -> Tensor:
        assert callable(function)
        first = torch.autograd.grad((function(x) * y.sin()).sum(), x, create_graph=True)[0]
        return (first.square() * x).sum()

    for own, torchs in zip(
        torch.autograd.grad(value(larger_first), (x, y)), torch.autograd.grad(value(by_torch), (x, y)), strict=True
    ):
        torch.testing.assert_close(own, torchs)


def test_what_is_no_number_harms_its_own_pair_alone() -> None:
    x = torch.tensor([[math.nan, 1.0, 2.0, math.nan, -math.inf, math.inf, math.inf, 3.0, 0.0, 5.0]])
    out = larger_first(x)
    assert torch.isnan(out).tolist() == [[True, False, False, True, *[False] * 6]]
    assert out[0, 4:].tolist() == [math.inf, -math.inf, math.inf, 3.0, 5.0, 0.0]
    image = x.reshape(1, 10, 1, 1).expand(1, 10, 2, 3).contiguous()
    assert torch.equal(larger_first(image)[..., 0, 0].nan_to_num(7.0), out.nan_to_num(7.0))


def test_one_byte_of_each_pair_is_kept_for_the_backward_pass() -> None:
    def kept(function: object) -> int:
        assert callable(function)
        storages: dict[int, int] = {}

        def see(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(see, lambda t: t):
            function(torch.randn(8, 16, 9, requires_grad=True) * 1.0)
        return sum(storages.values())

    assert kept(larger_first) == 8 * 8 * 9
    assert kept(by_torch) == 8 * 16 * 9 * 4


def test_threads_change_nothing() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 32, 14, 14, requires_grad=True)
    direction, before = torch.randn_like(x), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = larger_first(x)
            results.append((out.detach(), gradient(x, out, direction)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(results[0], result, strict=True))


def test_gradients_per_example_of_torch_func() -> None:
    x = torch.randn(5, 6)
    found = torch.func.vmap(torch.func.grad(lambda row: larger_first(row[None]).square().sum()))(x)
    torch.testing.assert_close(found, 2 * x)
    jacobian = torch.func.jacrev(lambda row: larger_first(row[None])[0])(x[0])
    assert torch.equal(jacobian.sum(0), torch.ones(6)) and torch.equal(jacobian @ x[0], larger_first(x[:1])[0])
