"""WideResNets: certificates of the published sizes, one real step of 16-4, ten private steps of a thin one."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from small_runs import fit, make_module, make_plan, weights
from torch import Tensor

from lipdp_lightning.bounds import certify
from lipdp_lightning.bounds.losses import CrossEntropy
from lipdp_lightning.data_modules import Digits
from lipdp_lightning.data_modules.base import PrivateDataModule
from lipdp_lightning.layers import make_private
from lipdp_lightning.models import WideResNet


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


class Noise(PrivateDataModule):
    """Sixteen coloured images of nothing."""

    input_shape = (3, 32, 32)
    task = "classification"
    num_classes = 10
    declared_size = 60

    def load_train(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return torch.rand(60, 3, 32, 32, generator=generator), torch.arange(60) % 10


def check_on_examples(network: WideResNet, bound: float) -> None:
    """Finite bounds for every parameter, and above what a white image and a random one reach."""
    certificate = certify(make_private(network), (3, 32, 32), bound, "cross_entropy")
    covered = {name for group in certificate.groups for name in group.parameters}
    assert covered == {name for name, _ in network.named_parameters()}
    named = dict(network.named_parameters())
    white = torch.ones(1, 3, 32, 32)
    for x in (white, torch.randn(1, 3, 32, 32)):
        x = x * (bound / x.norm())
        network.zero_grad()
        CrossEntropy().per_example(network(x), torch.tensor([1])).sum().backward()
        for group in certificate.groups:
            size = math.hypot(*(float(named[n].grad.norm()) for n in group.parameters))
            assert size <= group.worst_case < 1e6, group.name


def test_the_certificate_of_a_thin_network() -> None:
    check_on_examples(WideResNet(depth=10, width=1), 30.0)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [16, 40])
def test_the_certificates_of_the_wide_networks(depth: int) -> None:
    check_on_examples(WideResNet(depth=depth, width=4), 30.0)


def test_ten_private_steps_of_a_thin_network() -> None:
    module = make_module(network=WideResNet((1, 8, 8), depth=10, width=1), input_bound=8.0)
    before = weights(module)
    data = Digits()
    options = {"dataset_size": data.dataset_size, "expected_batch_size": 24.0, "steps": 10, "max_norm": 1.0}
    module, trainer = fit(make_plan(**options), module=module, data=data)
    assert trainer.global_step == 10
    after = weights(module)
    assert bool(torch.isfinite(after).all()) and float((after - before).norm()) > 0
    certificate = certify(module.network, (1, 8, 8), 8.0, "cross_entropy")
    assert all(u.lipschitz <= 1 + 1e-4 for g in certificate.groups for u in g.uses)


@pytest.mark.slow
def test_one_real_step_of_a_wide_network() -> None:
    module = make_module(network=WideResNet(depth=16, width=4), input_bound=30.0)
    before = weights(module)
    module, trainer = fit(make_plan(expected_batch_size=6.0, steps=1, max_norm=1.0), module=module, data=Noise())
    assert trainer.global_step == 1
    assert bool(torch.isfinite(weights(module)).all()) and float((weights(module) - before).norm()) > 0
