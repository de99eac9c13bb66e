"""Views, shares of the noise, standardised kernels, clips and averages, together, on every network."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from private_step import Harness, Noiseless, make_plan, random_batch
from test_every_model import NETWORKS
from torch import nn

from lipdp_lightning.bounds.certifier import certify
from lipdp_lightning.training.averaging import WeightAverage
from lipdp_lightning.training.views import Views

VIEWS = 2
LONG = ("timm", "wide resnet", "fashion_133k", "mnist_83k", "thesis_1626k")


def kernels(network: nn.Module) -> list[torch.Tensor]:
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv1d | nn.Conv2d)]
    return [m.weight.detach().flatten(1) for m in convolutions if m.weight.requires_grad]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in NETWORKS])
def test_the_kit_together(name: str) -> None:
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    network = build()
    groups = [group.name for group in certify(network, shape, 1.0, "cross_entropy").groups]
    weights = ((groups[-1], 3.0), ("*", 1.0)) if len(groups) > 1 else (("*", 1.0),)
    plan = make_plan(
        scaling="layerwise", allocation="custom", group_weights=weights, loss_clip=0.5, max_norm=1.0,
        standardize="mean" if kernels(network) else "none",
    )  # fmt: skip
    harness = Harness(network, shape, plan, kind=partial(Noiseless, views=VIEWS))
    strategy: Any = harness.module.trainer.strategy
    strategy.views, strategy.step_key = Views(VIEWS, []), lambda *parts: 1
    sensitivities, deviations = harness.mechanism.sensitivities(), harness.mechanism.deviations()
    share = {k: (sensitivities[k] / deviations[k] * plan.noise_multiplier) ** 2 for k in sensitivities}
    assert sum(share.values()) == pytest.approx(1)
    assert share[groups[-1]] == pytest.approx(0.75 if len(groups) > 1 else 1)

    average = WeightAverage("polyak")
    for step in range(2):
        harness.release(random_batch(5, shape, 4), step)
        torch.optim.SGD([p for p in network.parameters() if p.requires_grad], 0.1).step()
        harness.mechanism.project_()
        average.update(harness.module.network, step + 1)
    assert all(float(rows.mean(1).abs().max()) < 1e-6 for rows in kernels(harness.module.network))
    average.show(harness.module.network)
    assert all(float(rows.mean(1).abs().max()) < 1e-6 for rows in kernels(harness.module.network))
    for group in certify(harness.module.network, shape, 1.0, "cross_entropy").groups:
        assert group.uses[0].lipschitz <= 1 + 1e-5, group.name
    average.hide()
    harness.mechanism.close()
