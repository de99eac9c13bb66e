"""Cross-entropy with a linear tail: lipdp_lightning/bounds/losses.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lipdp_lightning.bounds.losses import BinaryCrossEntropy, CrossEntropy, SaturatingCrossEntropy


def gradients(loss: SaturatingCrossEntropy | CrossEntropy, logits: Tensor, target: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    loss.per_example(leaf, target).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def cases() -> tuple[Tensor, Tensor]:
    """Random logits of every size, and the worst: one wrong class with all the mass."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 7, dtype=torch.float64, generator=generator) * torch.logspace(-2, 3, 4000).unsqueeze(1)
    worst = 200.0 * torch.eye(7, dtype=torch.float64)
    return torch.cat([logits, worst]), torch.cat([torch.arange(4000) % 7, (torch.arange(7) + 1) % 7])


@pytest.mark.parametrize(("slope", "temperature"), [(0.15, 1.0), (0.5, 0.3), (0.02, 4.0)])
def test_the_constant_holds_and_is_attained(slope: float, temperature: float) -> None:
    loss = SaturatingCrossEntropy(slope=slope, temperature=temperature)
    largest = gradients(loss, *cases()).norm(dim=1).max().item()
    assert 0.9999 <= largest / loss.lipschitz((7,)) <= 1 + 1e-9
    # the derivative in the margin alone, without the sqrt(2) of the margin's own gradient, is no bound
    assert largest > 1.4 * slope / temperature


def test_class_weights_multiply() -> None:
    loss = SaturatingCrossEntropy(slope=0.2, class_weights=(1.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    sizes = gradients(loss, *cases()).norm(dim=1)
    assert 0.9999 <= sizes.max().item() / loss.lipschitz((7,)) <= 1 + 1e-9
    assert sizes.max().item() > 2.9 * SaturatingCrossEntropy(slope=0.2).lipschitz((7,))


def test_positions_add_up() -> None:
    loss = SaturatingCrossEntropy(slope=0.2)
    logits, target = cases()
    worst = gradients(loss, logits[-1:].unsqueeze(2).repeat(1, 1, 9), target[-1:].unsqueeze(1).repeat(1, 9))
    assert worst.norm().item() == pytest.approx(loss.lipschitz((7, 9)), rel=1e-9)
    assert loss.per_example(logits[:2].unsqueeze(2), target[:2].unsqueeze(1)).shape == (2,)


def test_it_is_cross_entropy_where_the_model_is_nearly_right_and_keeps_its_direction_elsewhere() -> None:
    logits, target = cases()
    plain, loss = CrossEntropy(), SaturatingCrossEntropy(slope=0.15)
    error = 1 - logits.softmax(1).gather(1, target.unsqueeze(1)).squeeze(1)
    below = error < 0.149
    ours, theirs = gradients(loss, logits, target), gradients(plain, logits, target)
    assert 100 < int(below.sum()) < 3500
    torch.testing.assert_close(ours[below], theirs[below], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(loss.per_example(logits, target)[below], plain.per_example(logits, target)[below])
    torch.testing.assert_close(ours[~below] * (error[~below] / 0.15).unsqueeze(1), theirs[~below], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("goal", [0.0, 1.0])
def test_with_two_classes_it_is_the_saturating_binary_loss(goal: float) -> None:
    """The derivative is that of binary cross-entropy, cut off at the slope: what clipping it would leave."""
    logits = torch.linspace(-9, 9, 401, dtype=torch.float64, requires_grad=True)
    target = torch.full((401,), goal)
    loss = BinaryCrossEntropy(slope=0.2)
    (ours,) = torch.autograd.grad(loss.per_example(logits, target).sum(), logits)
    torch.testing.assert_close(ours, (logits.sigmoid() - goal).clamp(-0.2, 0.2).detach(), rtol=1e-9, atol=1e-12)
    pairs = torch.stack((torch.zeros(401, dtype=torch.float64), logits.detach()), dim=1)
    theirs = SaturatingCrossEntropy(slope=0.2).per_example(pairs, target.long())
    torch.testing.assert_close(loss.per_example(logits, target), theirs)
    assert torch.isfinite(loss.per_example(torch.tensor([1e4, -1e4]), torch.tensor([1, 0]))).all()


def test_it_is_convex() -> None:
    """On segments between random points; the capped derivative of a loss that is not convex fails it."""
    generator = torch.Generator().manual_seed(1)
    left, right = (4 * torch.randn(5000, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    target = torch.arange(5000) % 5

    def violation(value) -> float:  # type: ignore[no-untyped-def]
        return (value((left + right) / 2) - (value(left) + value(right)) / 2).max().item()

    assert violation(lambda z: SaturatingCrossEntropy(slope=0.15).per_example(z, target)) <= 1e-9
    assert violation(lambda z: 1 - z.softmax(1).gather(1, target.unsqueeze(1)).squeeze(1)) > 0.1


def test_large_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]])
    loss = SaturatingCrossEntropy(slope=0.15)
    target = torch.tensor([1, 1])
    assert torch.isfinite(loss.per_example(logits, target)).all()
    assert torch.isfinite(gradients(loss, logits, target)).all()


def test_bad_arguments_are_named() -> None:
    for slope in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match=r"slope=.*HINT"):
            SaturatingCrossEntropy(slope=slope)
    with pytest.raises(ValueError, match=r"label_smoothing.*HINT"):
        SaturatingCrossEntropy(label_smoothing=0.1)
    with pytest.raises(ValueError, match=r"two classes.*HINT"):
        SaturatingCrossEntropy().lipschitz((1,))
