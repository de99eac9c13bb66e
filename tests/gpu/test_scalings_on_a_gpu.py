"""Every scaling, micro-batches and an empty sample end with the weights of the CPU on the pretended GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pretend import pretended_gpu
from private_step import NETWORKS, make_plan, random_batch
from steps import take_exact_norms, take_steps

PLANS: dict[str, dict[str, Any]] = {
    "worst_case": {"scaling": "worst_case"},
    "layerwise": {"scaling": "layerwise"},
    "joint": {"scaling": "joint"},
    "radius": {"scaling": "radius", "radius": 1.0},
    "exact": {"scaling": "exact", "radius": 1.0},
    "secure": {"scaling": "joint", "secure": True},
    "a tracked radius": {"scaling": "radius", "radius_quantile": 0.5, "radius_noise_multiplier": 4.0},
    "a clipped loss": {"scaling": "joint", "loss_clip": 0.5},
}


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("scaling", PLANS)
def test_the_weights_are_those_of_the_cpu(scaling: str, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    take_exact_norms(monkeypatch)
    build, shape = NETWORKS["convnet"]
    plan = make_plan(expected_batch_size=100, dataset_size=5000, **PLANS[scaling])
    torch.manual_seed(0)
    network = build()
    for size in (12, 0):
        batches = [random_batch(size, shape, 5, seed=size)]
        host = take_steps(network, shape, plan, batches, on_gpu=False, chunks=chunks)
        with pretended_gpu(monkeypatch):
            device = take_steps(network, shape, plan, batches, on_gpu=True, chunks=chunks)
        apart = (host.weights[0] - device.weights[0]).norm() / host.weights[0].norm()
        assert float(apart) < 1e-5
        assert device.phases["release"].to_device <= 1024, "noise was copied"
