"""What a step takes over from the one before, and when it must not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from private_step import Harness, make_plan, mlp, random_batch
from torch import nn

from lipdp_lightning.bounds.identity import NetworkIdentity
from lipdp_lightning.mechanism.step import Mechanism
from lipdp_lightning.norms import follow
from lipdp_lightning.norms.follow import Follower
from lipdp_lightning.privacy.digests import PendingDigest


def harness(kind: type[Mechanism] = Mechanism, **options: object) -> Harness:
    torch.manual_seed(0)
    return Harness(mlp(), (12,), make_plan(scaling="joint", max_norm=1.0, **options), kind=kind)


def spectral(module: nn.Module) -> float:
    return float(torch.linalg.matrix_norm(module.weight.detach().double(), 2))


class NeverLooksAgain(Mechanism):
    """Takes all weights for those that were projected."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._digest = SimpleNamespace(begin=lambda named: PendingDigest([b"the same"]))


def certified_after_growth(kind: type[Mechanism], through_data: bool) -> tuple[float, float]:
    """Certified and true norm of the last layer after something enlarges it between two steps."""
    own = harness(kind)
    own.release(random_batch(20, (12,), 5))
    own.mechanism.project_()
    head = own.module.network[-1]
    with torch.no_grad():
        (head.weight.data if through_data else head.weight).mul_(3.0)
    own.mechanism.begin_step(1)
    node = next(n for n in own.mechanism.certificate.nodes if n.cotangent == own.mechanism.certificate.loss_lipschitz)
    own.mechanism.close()
    return node.lipschitz[0], spectral(head)


@pytest.mark.parametrize("through_data", [False, True])
def test_bounds_of_a_projection_serve_only_the_weights_it_left(through_data: bool) -> None:
    certified, true = certified_after_growth(Mechanism, through_data)
    assert certified >= true
    certified, true = certified_after_growth(NeverLooksAgain, through_data)
    assert certified < true


def test_the_certificate_after_a_projection_measures_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    own = harness()
    own.release(random_batch(20, (12,), 5))
    own.mechanism.project_()
    follower = own.mechanism._follower
    names = ["1.weight", "3.weight", "5.weight"]
    projected = {name: follower.bound(name) for name in names}
    monkeypatch.setattr(follow, "changes", lambda *_: pytest.fail("measured twice"))
    own.mechanism.begin_step(1)
    assert {name: follower.bound(name) for name in names} == projected and max(projected.values()) <= 1.0
    monkeypatch.undo()
    follower.begin()
    # the same bounds up to rounding
    assert {name: follower.bound(name) for name in names} == pytest.approx(projected, rel=1e-5)
    own.mechanism.close()


@pytest.mark.parametrize("kind", ["fixed", "bjorck", "clip_singular", "frobenius"])
def test_a_projection_that_certifies_its_result_is_not_certified_again(kind: str) -> None:
    own = harness(projection=kind)
    follower = own.mechanism._follower
    with torch.no_grad():
        for parameter in own.module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # far enough for exact norms to fall due
    own.mechanism.project_()
    before = {name: anchor["reference"] for name, anchor in follower.state()["anchors"].items()}
    follower.begin()
    for name, parameter in own.module.network.named_parameters():
        for operator in follower.operators_of(name):
            assert operator.norm(parameter) <= follower.bound(name) * (1 + 1e-12)
    after = {name: anchor["reference"] for name, anchor in follower.state()["anchors"].items()}
    assert len(before) == 3 and all(after[name] is reference for name, reference in before.items())
    own.mechanism.close()


# ---- the tensors of a model


def test_a_change_in_place_shows_in_the_versions() -> None:
    own = harness()
    before = own.mechanism._versions()
    assert before == own.mechanism._versions() and len(before) == len(own.module.network.state_dict())
    with torch.no_grad():
        own.module.network[-1].weight.add_(1)
    assert own.mechanism._versions() != before
    own.mechanism.close()


def test_replaced_and_added_tensors_are_seen() -> None:
    """Other tensors are those of another network."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    identity = NetworkIdentity.of(model)
    with torch.no_grad():
        model[1][0].weight.add_(1)
    assert identity.differences() == []
    kept = model[1][0].weight
    model[1][0].weight = nn.Parameter(torch.zeros(3, 3))
    assert identity.differences() == ["1.0.weight is another than it was"]
    model[1][0].weight = kept
    assert identity.differences() == []
    model[1].append(nn.BatchNorm1d(3))
    assert any("1.1 was added" in word for word in identity.differences())
    model[1]._modules.pop("1")
    model[0].register_buffer("mask", torch.ones(3))
    assert identity.differences() == ["buffer 0.mask was added"]


class StaleVectors(Follower):
    """Broken on purpose: answers for biases with what they were at first."""

    def vector_norm(self, vector: torch.Tensor) -> float:
        known = self.__dict__.setdefault("first", {})
        return known.setdefault(id(vector), super().vector_norm(vector))  # type: ignore[no-any-return]


@pytest.mark.parametrize("norms", [Follower, StaleVectors])
def test_bounds_follow_biases_that_grow(norms: type[Follower], monkeypatch: pytest.MonkeyPatch) -> None:
    """On an input of zero, the second layer receives the first one's bias, which no projection keeps small."""
    monkeypatch.setattr("private_step.Follower", norms)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Linear(8, 5))
    own = Harness(network, (12,), make_plan(scaling="worst_case", max_norm=1.0), kind=Mechanism)
    followed = True
    for step in range(12):
        own.mechanism.begin_step(step)
        (use,) = own.mechanism.certificate.groups[-1].uses
        true = (network[1].bias.detach().double().square().sum() + 1).sqrt().item()
        followed &= use.gradient_factor >= true
        with torch.no_grad():
            network[1].bias.mul_(1.6)
        own.mechanism.project_()
    own.mechanism.close()
    assert followed is (norms is Follower)
