"""Weights and images in channels_last: the same certificate, the same release, and the layout stays."""

from __future__ import annotations

import copy

import pytest
import torch
from private_step import Harness, Noiseless, convnet, make_plan, random_batch

from lipdp_lightning.training import PrivateModule

CHANNELS_LAST = torch.channels_last


def harness(layout: torch.memory_format, scaling: str) -> Harness:
    torch.manual_seed(0)
    network = convnet().to(memory_format=layout)
    radius = 0.1 if scaling == "exact" else None
    return Harness(network, (2, 8, 8), make_plan(scaling=scaling, radius=radius, max_norm=1.0), kind=Noiseless)


@pytest.mark.parametrize("scaling", ["worst_case", "layerwise", "joint", "exact"])
def test_channels_last_changes_neither_certificate_nor_release(scaling: str) -> None:
    plain, last = harness(torch.contiguous_format, scaling), harness(CHANNELS_LAST, scaling)
    kernel = next(p for p in last.module.network.parameters() if p.dim() == 4)
    assert kernel.is_contiguous(memory_format=CHANNELS_LAST) and not kernel.is_contiguous()
    optimizer = torch.optim.SGD(last.module.parameters(), lr=0.01)
    for step in range(3):
        x, y, ids = random_batch(20, (2, 8, 8), 5, seed=step)
        expected = plain.release((x, y, ids), step)
        found = last.release((x.contiguous(memory_format=CHANNELS_LAST), y, ids), step)
        for name, values in expected.items():
            assert torch.allclose(found[name], values, rtol=1e-4, atol=1e-6), name
        assert last.mechanism.deviations() == pytest.approx(plain.mechanism.deviations(), rel=1e-5)
        assert kernel.grad is not None
        if scaling != "exact":
            assert kernel.grad.is_contiguous(memory_format=CHANNELS_LAST)
        optimizer.step()
        for own, other in zip(plain.module.parameters(), last.module.parameters(), strict=True):
            own.data.copy_(other.data)
        plain.mechanism.project_()
        last.mechanism.project_()
        assert kernel.is_contiguous(memory_format=CHANNELS_LAST)
    for own in (plain, last):
        own.mechanism.close()


def test_a_module_lays_out_kernels_and_images_itself() -> None:
    torch.manual_seed(0)
    network = convnet()
    plain = PrivateModule(copy.deepcopy(network))
    module = PrivateModule(network, channels_last=True)
    read = []
    module.network.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    x = torch.rand(3, 2, 8, 8)
    assert torch.allclose(module(x), plain(x), rtol=1e-5, atol=1e-6)
    kernels = [p for p in module.network.parameters() if p.dim() == 4]
    assert kernels and all(tensor.is_contiguous(memory_format=CHANNELS_LAST) for tensor in (*kernels, *read))
