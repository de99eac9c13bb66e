"""Each network: its certificate is finite and stands an attack, and a private step on it keeps to its bound."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from private_step import Harness, influence, make_plan, random_batch
from torch import nn

from lipdp_lightning import models
from lipdp_lightning.audit import attack
from lipdp_lightning.bounds.losses import CrossEntropy
from lipdp_lightning.layers import GroupNorm, make_private
from lipdp_lightning.models import (
    MLP,
    ConvNet,
    FrozenNetwork,
    GaborNet,
    Linear,
    MLPMixer,
    NormPreservingConvNet,
    NormPreservingMLP,
    PublishedConvNet,
    ResNet,
    ScatteringHead,
    ShallowVGG,
    TimmHead,
    Transformer,
    WideResNet,
)

GREY, COLOUR, TOKENS = (1, 8, 8), (3, 8, 8), (6,)
NETWORKS: dict[str, tuple[partial[nn.Module], tuple[int, ...]]] = {
    "linear": (partial(Linear, GREY, 4, zero_init=False), GREY),
    "mlp": (partial(MLP, GREY, 4, (12, 8), "tanh"), GREY),
    "convnet": (partial(ConvNet, GREY, 4, (4, 6), norm_groups=2, hidden=(8,)), GREY),
    "mnist_83k": (partial(PublishedConvNet, "mnist_83k", (1, 16, 16), 4), (1, 16, 16)),
    "fashion_133k": (partial(PublishedConvNet, "fashion_133k", (1, 16, 16), 4), (1, 16, 16)),
    "thesis_1626k": (partial(PublishedConvNet, "thesis_1626k", GREY, 4, norm_groups=4), GREY),
    "shallow vgg": (partial(ShallowVGG, COLOUR, 4, (4, 6, 8), pooling_name="average"), COLOUR),
    "shallow vgg, l2": (partial(ShallowVGG, COLOUR, 4, (4, 6), "maxmin", "l2", norm_groups=2), COLOUR),
    "resnet": (partial(ResNet, COLOUR, 4, (4, 8), activation_name="maxmin"), COLOUR),
    "wide resnet": (partial(WideResNet, COLOUR, 4, 10, 1, norm_groups=4), COLOUR),
    "gabor": (partial(GaborNet, GREY, 4, 4, 3, 2, norm_groups=2), GREY),
    "gabor, deeper": (partial(GaborNet, COLOUR, 4, 4, 3, 1, pool=2, deeper=(6,), norm_groups=2, bias=True), COLOUR),
    "mixer": (partial(MLPMixer, COLOUR, 4, 4, 6, 5, 8, 1), COLOUR),
    "mixer without normalisation": (partial(MLPMixer, COLOUR, 4, 2, 6, 5, 8, 1, "maxmin", 0.0, False), COLOUR),
    "norm preserving mlp": (partial(NormPreservingMLP, GREY, 4, (16, 8), 4), GREY),
    "norm preserving convnet": (partial(NormPreservingConvNet, GREY, 4, (4, 8), (2, 2), pool=2), GREY),
    "scattering, linear": (partial(ScatteringHead, GREY, 4, J=1, L=2, norm_groups=1, mode="clip"), GREY),
    "scattering, convolution": (partial(ScatteringHead, GREY, 4, J=1, L=2, widths=(6,), bound=2.0), GREY),
    "transformer": (partial(Transformer, TOKENS, 4, 9, 8, 2, 2, 6), TOKENS),
    "transformer, class token": (partial(Transformer, TOKENS, 4, 9, 8, 2, 1, 0, "class", frozen_queries=True), TOKENS),
    "timm": (partial(TimmHead, "test_resnet", 4, False, COLOUR, image_size=16, hidden=(6,)), COLOUR),
}  # fmt: skip


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield


def test_every_exported_network_is_here() -> None:
    assert {build.func.__name__ for build, _ in NETWORKS.values()} | {FrozenNetwork.__name__} == set(models.__all__)


@pytest.mark.parametrize("name", NETWORKS)
def test_certificate_attack_and_a_private_step(name: str) -> None:
    build, shape = NETWORKS[name]
    loss = CrossEntropy(temperature=0.5)
    network = make_private(build())
    report = attack(network, shape, 1.0, loss, restarts=6, steps=3)
    assert not report.violations(), report.worst
    assert report.worst.ratio > 0.1

    harness = Harness(network, shape, make_plan(scaling="joint", max_norm=1.0), loss=loss)
    certificate = harness.mechanism.certificate
    assert all(0 < g.worst_case < math.inf for g in certificate.groups)
    assert {n for g in certificate.groups for n in g.parameters} == {
        n for n, p in network.named_parameters() if p.requires_grad
    }
    before = {n: p.detach().clone() for n, p in network.named_parameters() if not p.requires_grad}
    harness.release(random_batch(5, shape, 4))
    for group in certificate.groups:
        assert any(float(v.norm()) > 0 for n, v in harness.gradients().items() if n == group.name), group.name
    torch.optim.SGD([p for p in network.parameters() if p.requires_grad], 0.1).step()
    harness.mechanism.project_()
    assert all(torch.equal(p, before[n]) for n, p in network.named_parameters() if n in before)
    witness = next(v for k, v in report.witnesses.items() if k.startswith("joint"))
    own = influence(harness, (witness[0].float(), witness[1]), 1)
    assert 0 < own <= 1 + 1e-5


def test_the_check_finds_a_normalisation_with_half_the_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken network of the same kind: its divisor is floored at half of what its rule relies on."""
    network = make_private(MLPMixer(COLOUR, 4, 4, 6, 5, 8, 1, norm_alpha=0.5))
    honest = GroupNorm.forward

    def careless(self: GroupNorm, x: torch.Tensor) -> torch.Tensor:
        return 3 * honest(self, x)

    monkeypatch.setattr(GroupNorm, "forward", careless)
    assert attack(network, COLOUR, 1.0, CrossEntropy(temperature=0.5), restarts=6, steps=4).violations()
