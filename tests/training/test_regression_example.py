"""The regression example of Barczewski & Ramon 2024, appendix E: clipping moves the optimum, our scalings do not.

x is uniform on [0, 1], y = a x + b + e with e = 9 in one case of ten and -1 in nine. The population's gradient is
computed on a grid of x, without sampling and without noise, by the layers and losses that train models.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from private_step import Harness, Noiseless, make_plan
from torch import Tensor, nn

from lipdp_lightning.bounds.losses import Huber, Loss, SquaredError

A, B = 0.5, -0.3
GRID = 400
STARTS = [(A, B), (3.0, 2.0), (-4.0, 5.0)]
RATE = {"joint": 0.5}  # its factors are at least 1


def population() -> tuple[Tensor, Tensor, Tensor]:
    """Midpoints of a grid on [0, 1], each with both errors in their proportion: nine of -1, one of 9."""
    x = ((torch.arange(GRID) + 0.5) / GRID).repeat_interleave(10)
    errors = torch.tensor([9.0] + [-1.0] * 9).repeat(GRID)
    return x.unsqueeze(1), (A * x + B + errors).unsqueeze(1), torch.arange(10 * GRID)


def line(start: tuple[float, float]) -> nn.Sequential:
    network = nn.Sequential(nn.Linear(1, 1)).double()
    with torch.no_grad():
        network[0].weight.fill_(start[0])
        network[0].bias.fill_(start[1])
    return network


def converged(loss: Loss, start: tuple[float, float], **plan: Any) -> tuple[float, float]:
    """Where gradient descent on the released population gradient ends, minus (a, b)."""
    network = line(start)
    # no projection: the optimum must be inside the constraint for the comparison, and slope a is public here
    harness = Harness(network, (1,), make_plan(max_norm=None, **plan), loss=loss, kind=Noiseless)
    x, y, ids = population()
    batch = (x.double(), y.double(), ids)
    second_moments = torch.tensor([[1 / 3, 1 / 2], [1 / 2, 1.0]], dtype=torch.float64)
    for step in range(200):
        gradient = harness.release(batch, step)["0"] / len(ids)
        if gradient.abs().max() < 1e-10:
            break
        # any descent direction has the same fixed points; this one is Newton's for the unscaled squared loss
        update = torch.linalg.solve(second_moments, gradient)
        with torch.no_grad():
            network[0].weight.sub_(RATE.get(harness.plan.scaling, 1.0) * update[0])
            network[0].bias.sub_(RATE.get(harness.plan.scaling, 1.0) * update[1])
    harness.mechanism.close()
    return network[0].weight.item() - A, network[0].bias.item() - B


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("scaling", ["worst_case", "layerwise", "joint", "radius"])
@pytest.mark.parametrize("loss", [SquaredError(output_bound=40.0, target_bound=40.0), Huber(delta=40.0)])
def test_scalings_by_the_input_converge_to_the_true_line(loss: Loss, scaling: str, start: tuple[float, float]) -> None:
    """Weight and bias are one group and share their factor, which depends on x alone; E[e | x] = 0 at (a, b)."""
    options: dict[str, Any] = {"radius": 1.1} if scaling == "radius" else {}
    slope, intercept = converged(loss, start, scaling=scaling, **options)
    assert slope == pytest.approx(0, abs=1e-6)
    assert intercept == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("start", STARTS)
def test_clipping_converges_to_the_stated_point_below_the_line(start: tuple[float, float]) -> None:
    """(a - 0.01765, b - 0.94221): rare large positive errors are cut, so the line is too low, not too high."""
    slope, intercept = clipped_descent(start)
    assert slope == pytest.approx(-0.01765, abs=2e-4)
    assert intercept == pytest.approx(-0.94221, abs=2e-4)


def per_example_clipped(theta: Tensor, radius: float = 1.0) -> Tensor:
    """The mean of gradients of (theta_1 x + theta_2 - y)^2, each clipped to the radius, as the paper sets it up."""
    x, y, _ = population()
    x, y = x.double().squeeze(1), y.double().squeeze(1)
    residual = 2 * (theta[0] * x + theta[1] - y)
    gradients = torch.stack([residual * x, residual], dim=1)
    size = gradients.norm(dim=1, keepdim=True).clamp_min(radius)
    return (gradients * radius / size).mean(0)


def clipped_descent(start: tuple[float, float]) -> tuple[float, float]:
    theta = torch.tensor(start, dtype=torch.float64)
    for rate in (1.0, 0.5, 0.1):
        for _ in range(1500):
            theta = theta - rate * per_example_clipped(theta)
    assert per_example_clipped(theta).norm() < 1e-4
    return theta[0].item() - A, theta[1].item() - B


def test_the_clipped_gradient_at_the_true_line_has_the_stated_norm_and_direction() -> None:
    gradient = per_example_clipped(torch.tensor([A, B], dtype=torch.float64))
    assert gradient.norm().item() == pytest.approx(0.7791, abs=5e-3)
    assert (gradient > 0).all()  # descent lowers both: the published sign is the other one
    published = per_example_clipped(torch.tensor([A + 0.01765, B + 0.94221], dtype=torch.float64))
    assert published.norm() > 0.5


def test_loss_clip_brings_that_bias_back() -> None:
    """Clipping at the logits cuts the large residuals alike; the line ends below the true one."""
    slope, intercept = converged(Huber(delta=40.0), (A, B), scaling="layerwise", loss_clip=1.0)
    assert intercept < -0.3
    assert abs(slope) < 0.05
