"""Weight standardisation after the step: kernels have mean 0, and the certificate is that of plain weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import Blobs, fit, make_module, make_plan
from torch import Tensor, nn

from lipdp_lightning.bounds.certifier import certify
from lipdp_lightning.callbacks import ParameterAveraging
from lipdp_lightning.layers import MaxMin
from lipdp_lightning.norm_balls import KINDS, standardize


class Pictures(Blobs):
    input_shape = (1, 2, 3)

    def _rows(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        x, y = super()._rows(count, seed)
        return x.reshape(-1, 1, 2, 3), y


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 2, padding=1), MaxMin(), nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(6 * 12, 3),
    )  # fmt: skip


def kernels(module: nn.Module) -> list[Tensor]:
    return [m.weight.detach().double().flatten(1) for m in module.modules() if isinstance(m, nn.Conv2d)]


def spread(rows: Tensor) -> float:
    norms = rows.norm(dim=1)
    return float(norms.max() / norms.min()) - 1


@pytest.mark.parametrize("variance", [False, True])
def test_it_is_a_projection(variance: bool) -> None:
    torch.manual_seed(1)
    weight = torch.randn(5, 3, 3, 3)
    before = weight.double().clone()
    standardize(weight, variance)
    rows = weight.double().flatten(1)
    assert float(rows.mean(1).abs().max()) < 1e-7
    centred = before.flatten(1) - before.flatten(1).mean(1, keepdim=True)
    if variance:
        assert spread(rows) < 1e-6 and rows.norm() == pytest.approx(float(centred.norm()), rel=1e-6)
    else:
        assert torch.allclose(rows, centred, atol=1e-6)
    once = weight.clone()
    standardize(weight, variance)
    assert torch.allclose(weight, once, atol=1e-7)


@pytest.mark.parametrize("variance", [False, True])
def test_a_constant_kernel_becomes_zero_and_not_nan(variance: bool) -> None:
    weight = torch.stack([torch.full((2, 3, 3), 0.5), torch.randn(2, 3, 3)])
    standardize(weight, variance)
    assert not weight[0].any() and torch.isfinite(weight).all() and weight[1].any()
    zero = torch.zeros(2, 2, 3, 3)
    standardize(zero, variance)
    assert not zero.any()


@pytest.mark.parametrize("projection", KINDS)
@pytest.mark.parametrize("kind", ["mean", "mean_and_variance"])
def test_trained_kernels_are_standardised_and_within_their_ball(kind: str, projection: str) -> None:
    plan = make_plan(standardize=kind, projection=projection, max_norm=0.7, steps=4)
    averaging = ParameterAveraging("polyak")
    module, trainer = fit(plan, averaging, data=Pictures(), module=make_module(rate=0.5, network=network()))
    for rows in kernels(module.network):
        assert float(rows.mean(1).abs().max()) < 1e-6
        if kind == "mean_and_variance" and projection in ("clip", "fixed", "frobenius"):
            assert spread(rows) < 1e-5, "a radial projection keeps equal norms"
    plain = network()
    plain.load_state_dict(module.network.state_dict())
    exact = certify(plain, (1, 2, 3), 1.0, "cross_entropy")
    for group, (norm, _) in zip(exact.groups, trainer.strategy.mechanism.boundary().values(), strict=True):
        assert group.uses[0].lipschitz <= norm * (1 + 1e-6)  # which has the margin of an operation in float32
        if projection in ("clip", "fixed", "clip_singular"):
            assert norm <= 0.7 * (1 + 1e-6)
    means = [averaging.weights()[name].flatten(1).mean(1) for name in ("0.weight", "2.weight")]
    assert all(float(mean.abs().max()) < 1e-6 for mean in means), "an average of such kernels is none"


def test_without_the_switch_kernels_have_a_mean_and_free_layers_keep_it() -> None:
    def largest_means(**options: Any) -> list[float]:
        module, _ = fit(make_plan(steps=2, **options), data=Pictures(), module=make_module(network=network()))
        return [float(rows.mean(1).abs().max()) for rows in kernels(module.network)]

    assert min(largest_means()) > 0.01
    first, second = largest_means(standardize="mean", free_layers=("0",))
    assert first > 0.01 and second < 1e-6


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([nn.Flatten(), nn.Linear(6, 3)], "there is no convolution"),
        ([nn.Conv2d(1, 3, 1), nn.Flatten(), nn.Linear(18, 3)], "a kernel of one weight is its own mean: 0"),
    ],
)
def test_where_nothing_would_be_left_it_is_refused(layers: list[nn.Module], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"{reason}[\s\S]*HINT"):
        fit(make_plan(standardize="mean"), data=Pictures(), module=make_module(network=nn.Sequential(*layers)))
    with pytest.raises(ValueError, match=r"standardize 'both' is unknown"):
        make_plan(standardize="both")
