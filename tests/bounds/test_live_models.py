"""A certificate is of the model as it is: what a walk has prepared holds nothing that may change between walks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lipdp_lightning.bounds.certifier import CertificationError, Certifier
from lipdp_lightning.bounds.losses import Loss


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.activation = nn.LeakyReLU(0.5)
        self.register_buffer("mask", torch.linspace(0.5, 1.5, 6))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.activation(self.first(x)) * self.mask * self.scale)


def _in_place(network: Network) -> None:
    with torch.no_grad():
        network.first.weight.mul_(3)


CHANGES: dict[str, Callable[[Network], None]] = {
    "weights in place": _in_place,
    "weights by .data": lambda n: n.first.weight.data.mul_(3),
    "another bias": lambda n: setattr(n.first, "bias", nn.Parameter(torch.full((6,), 9.0))),
    "another parameter that forward reads": lambda n: setattr(n, "scale", nn.Parameter(torch.full((6,), 9.0))),
    "another buffer": lambda n: setattr(n, "mask", torch.full((6,), 9.0)),
    "a buffer in place": lambda n: n.mask.mul_(5),
    "a frozen layer": lambda n: n.first.requires_grad_(False),
    "a slope": lambda n: setattr(n.activation, "negative_slope", 7.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_certificate_is_that_of_a_new_walk(change: str) -> None:
    torch.manual_seed(0)
    network = Network()
    certifier = Certifier(network, (4,), 1.0, "cross_entropy")
    before = certifier.certify()
    CHANGES[change](network)
    after = certifier.certify()
    assert after == Certifier(network, (4,), 1.0, "cross_entropy").certify()
    assert after != before


def test_a_parameter_that_no_rule_bounds_is_refused_whenever_it_comes() -> None:
    network = Network()
    certifier = Certifier(network, (4,), 1.0, "cross_entropy")
    certifier.certify()
    network.activation.extra = nn.Parameter(torch.ones(()))
    with pytest.raises(CertificationError, match=r"activation.*its rule bounds no gradient"):
        certifier.certify()


SLOPE = [1.0]
"""What the loss below reads at every call."""


class Steep(Loss):
    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        return SLOPE[0] * logits.sum(1)

    def lipschitz(self, shape: tuple[int, ...]) -> float:
        return 2 * SLOPE[0]


def test_the_constant_of_the_loss_is_asked_for_in_every_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    certifier = Certifier(Network(), (4,), 1.0, Steep())
    before = certifier.certify()
    monkeypatch.setattr("test_live_models.SLOPE", [3.0])
    after = certifier.certify()
    assert after.loss_lipschitz == pytest.approx(3 * before.loss_lipschitz)
    assert after.group("first").worst_case == pytest.approx(3 * before.group("first").worst_case)
