"""With one linear layer and inputs of norm 1, loss_clip is DP-SGD's flat clipping: the same sums, to rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from lipdp_lightning.bounds.losses import CrossEntropy, Loss, SaturatingCrossEntropy
from lipdp_lightning.models import MLP
from lipdp_lightning.training.module import ClippedLoss

RADIUS = 0.3


def problem(norm: float) -> tuple[MLP, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x = torch.randn(200, 30, generator=generator, dtype=torch.float64)
    network = MLP([30], 10, bias=False).double()
    with torch.no_grad():
        network.layers[1].weight.mul_(20)
    return network, norm * x / x.norm(dim=1, keepdim=True), torch.arange(200) % 10


def gradient(network: MLP, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    network.zero_grad()
    loss.per_example(network(x), y).sum().backward()
    weight = network.layers[1].weight
    assert weight.grad is not None
    return weight.grad.clone()


def flat_clipping(network: MLP, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    """The sum of clipped gradients, one example at a time, and how many were longer than the radius."""
    total, clipped = torch.zeros(10, 30, dtype=torch.float64), 0
    for row, label in zip(x.split(1), y.split(1), strict=True):
        own = gradient(network, CrossEntropy(), row, label)
        clipped += int(own.norm() > RADIUS)
        total += own * min(1.0, RADIUS / float(own.norm()))
    return total, clipped


def test_loss_clip_is_flat_clipping() -> None:
    network, x, y = problem(norm=1.0)
    ours = gradient(network, ClippedLoss(CrossEntropy(), RADIUS), x, y)
    theirs, clipped = flat_clipping(network, x, y)
    assert 20 < clipped < 200
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_on_inputs_of_another_norm_it_is_not() -> None:
    network, x, y = problem(norm=2.0)
    ours = gradient(network, ClippedLoss(CrossEntropy(), RADIUS), x, y)
    assert (ours - flat_clipping(network, x, y)[0]).norm() > 0.1 * ours.norm()


def test_a_saturating_loss_is_near_it_and_not_the_same() -> None:
    """Its gradient has clipping's direction; where it saturates, its length follows the margin's own gradient."""
    network, x, y = problem(norm=1.0)
    clipped = gradient(network, ClippedLoss(CrossEntropy(), RADIUS), x, y)
    saturating = gradient(network, SaturatingCrossEntropy(slope=RADIUS / 2**0.5), x, y)
    cosine = torch.nn.functional.cosine_similarity(clipped.flatten(), saturating.flatten(), dim=0)
    assert 0.95 < float(cosine) < 1 - 1e-5
