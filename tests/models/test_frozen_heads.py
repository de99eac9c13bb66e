"""Heads on frozen features: the same trained on features computed once, replay digests, and whole private runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from private_step import Harness, make_plan, random_batch
from torch import nn

from lipdp_lightning.layers import BoundedInput
from lipdp_lightning.models import MLP, ConvNet, FrozenNetwork, ScatteringHead, TimmHead
from lipdp_lightning.training import PrivateModule

SHAPE = (1, 8, 8)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield


@pytest.mark.parametrize("convolutional", [False, True])
def test_a_head_trained_on_cached_features_is_the_head_of_the_whole_network(convolutional: bool) -> None:
    widths = (6,) if convolutional else ()
    whole = ScatteringHead(SHAPE, 4, J=1, L=2, bound=1.5, hidden=(8,), widths=widths)
    shape = whole.features.extractor.feature_shape
    head = ConvNet(shape, 4, widths, hidden=(8,)) if convolutional else MLP(shape, 4, (8,))
    x = random_batch(6, SHAPE, 4)[0]
    cached = whole.features.extractor(x)
    on_features = PrivateModule(head, input_bound=1.5, input_mode="normalize")
    whole.head.load_state_dict(on_features.network.state_dict())
    torch.testing.assert_close(whole(x), on_features(cached))

    options = {"scaling": "layerwise", "max_norm": 1.0}
    y = torch.arange(6) % 4
    first = Harness(whole, SHAPE, make_plan(**options), input_bound=10.0)
    second = Harness(on_features.network, shape, make_plan(**options), input_bound=1.5)
    sums = [
        first.release((x, y, torch.arange(6))),
        second.release((BoundedInput(1.5, "normalize")(cached), y, torch.arange(6))),
    ]
    for name, values in sums[1].items():
        torch.testing.assert_close(sums[0][f"head.{name}"], values, rtol=1e-4, atol=1e-6)
        sensitivities = first.mechanism.sensitivities()[f"head.{name}"], second.mechanism.sensitivities()[name]
        assert sensitivities[0] == pytest.approx(sensitivities[1], rel=1e-5)


def test_the_head_sees_only_the_ball() -> None:
    network = ScatteringHead(SHAPE, 4, J=1, L=2, bound=0.7)
    x = random_batch(4, SHAPE, 4)[0]
    torch.testing.assert_close(network(x), network(0.001 * x), rtol=1e-3, atol=1e-4)
    sizes = network.features(x).flatten(1).norm(dim=1)
    torch.testing.assert_close(sizes, torch.full((4,), 0.7), rtol=1e-5, atol=0)


def test_a_step_is_replayed_only_with_the_same_frozen_tensors() -> None:
    """What the backbone holds decides the sum, so it is in the digest that keys the noise."""

    def digest(change: str | None) -> bytes:
        torch.manual_seed(0)
        network = TimmHead("test_resnet", 4, False, (3, 16, 16), image_size=16)
        norm = next(m for m in network.modules() if isinstance(m, nn.BatchNorm2d))
        if change == "buffer":
            norm.running_mean[0] += 1e-6
        if change == "parameter":
            norm.weight.data[0] += 1e-6
        if change == "constants":
            network.features.extractor.mean += 1e-3
        harness = Harness(network, (3, 16, 16), make_plan())
        harness.mechanism.begin_step(0)
        return harness.mechanism.digest

    assert digest(None) == digest(None)
    assert len({digest(c) for c in (None, "buffer", "parameter", "constants")}) == 4


def test_a_frozen_network_takes_any_extractor_with_a_shape() -> None:
    class Corners(nn.Module):
        feature_shape = (4,)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, 0, ::7, ::7].flatten(1)

    network = FrozenNetwork(Corners().eval(), 3, bias=False)
    harness = Harness(network, SHAPE, make_plan())
    assert harness.mechanism.certificate.group("head.layers.1").worst_case == pytest.approx(2**0.5, rel=1e-4)
    with pytest.raises(ValueError, match=r"training mode.*HINT"):
        FrozenNetwork(Corners(), 3)
