"""Sums over micro-batches are rounded once, as the margin of a sensitivity assumes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import fit, make_plan
from torch import Tensor, nn

from lipdp_lightning.mechanism.step import Mechanism
from lipdp_lightning.training.current_step import PartialSums

MICRO_BATCHES = 1000


class InFloat32(PartialSums):
    """Broken on purpose: adds in the gradient's own precision."""

    def take(self) -> None:
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self._sums[index] = self._sums.get(index, torch.zeros_like(parameter)) + parameter.grad
                parameter.grad = None


def error(kind: type[PartialSums]) -> float:
    """How far the sum of equal gradients is from the exact one, in units of its own rounding."""
    layer = nn.Linear(3, 2)
    sums = kind(layer)
    gradients = {name: torch.full_like(p, 0.1) for name, p in layer.named_parameters()}
    for number in range(MICRO_BATCHES):
        assert all(p.grad is None for p in layer.parameters()), "a gradient without noise was left"
        for name, parameter in layer.named_parameters():
            parameter.grad = gradients[name].clone()
        if number < MICRO_BATCHES - 1:
            sums.take()
    sums.put_back()
    exact = MICRO_BATCHES * float(torch.tensor(0.1))
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32
    found: Tensor = torch.cat([p.grad.flatten() for p in layer.parameters()]).double()
    return float((found - exact).abs().max()) / (exact * 2.0**-24)


def test_many_micro_batches_round_once() -> None:
    assert error(PartialSums) <= 1.0
    assert error(InFloat32) > 10


def test_a_released_gradient_is_not_held_in_the_next_backward_pass() -> None:
    """It would add the size of all weights to the peak of a step."""
    layer = nn.Linear(3, 2)
    sums, held = PartialSums(layer), []
    for _ in range(2):
        sums.check_none()
        assert all(gradient() is None for gradient in held)
        layer(torch.ones(1, 3)).sum().backward()
        sums.put_back()
        sums.remember()
        held = [weakref.ref(p.grad.untyped_storage()) for p in layer.parameters()]
        layer.zero_grad(set_to_none=True)


def test_a_single_micro_batch_is_left_as_it_is() -> None:
    layer = nn.Linear(3, 2)
    sums, gradient = PartialSums(layer), torch.ones(2, 3)
    layer.weight.grad = gradient
    sums.put_back()
    assert layer.weight.grad is gradient and layer.bias.grad is None


class AddsToGradients(Callback):
    """Leaves a gradient between the moment when gradients are set to None and the step's own backward pass."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        for parameter in pl_module.network.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)


def test_a_gradient_that_a_hook_leaves_before_the_backward_pass_releases_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step would add to it, and release the sum with the noise for what the step adds alone."""
    released: list[int] = []
    monkeypatch.setattr(Mechanism, "privatize_", lambda *_, **__: released.append(1))
    with pytest.raises(ValueError, match=r"a gradient was there before.*HINT"):
        fit(make_plan(steps=2), AddsToGradients())
    assert not released


def test_a_release_that_was_written_to_is_no_longer_one() -> None:
    """Loops that leave a release in ``grad`` add to it, which is public; what is written into it need not be."""
    layer = nn.Linear(3, 2)
    sums = PartialSums(layer)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    sums.remember()
    sums.check_none()
    sums.remember()
    assert layer.bias.grad is not None
    layer.bias.grad.add_(1)
    with pytest.raises(ValueError, match=r"a gradient was there before.*HINT"):
        sums.check_none()
