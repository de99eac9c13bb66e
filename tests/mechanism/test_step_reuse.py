"""What a step takes over from the one before, and when it must not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from private_step import Harness, make_plan, mlp, random_batch
from torch import Tensor, nn

from lipdp_lightning.mechanism.flat import PIECE, FlatGradients
from lipdp_lightning.mechanism.mechanism import Mechanism
from lipdp_lightning.mechanism.noise import NoisePrefetcher, NoiseSource
from lipdp_lightning.mechanism.release import Release
from lipdp_lightning.mechanism.watched import WatchedTensors
from lipdp_lightning.norms import follow
from lipdp_lightning.privacy.normals import words_of
from lipdp_lightning.privacy.randomness import CounterStream

SECRET = bytes(range(16))


def harness(kind: type[Mechanism] = Mechanism, **options: object) -> Harness:
    torch.manual_seed(0)
    return Harness(mlp(), (12,), make_plan(scaling="joint", max_norm=1.0, **options), kind=kind)


def spectral(module: nn.Module) -> float:
    return float(torch.linalg.matrix_norm(module.weight.detach().double(), 2))


class NeverLooksAgain(Mechanism):
    """Takes all weights for those that were projected."""

    def _weights_digest(self, named: Mapping[str, Tensor]) -> bytes:
        return b"the same"


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


# ---- noise


def test_a_draw_in_reused_memory_has_the_bits_of_a_fresh_one() -> None:
    sizes, deviations = [40_001, 7], [0.5, 2.0]

    def fresh(step: int) -> Tensor:
        return NoiseSource(SECRET).draw(step, sizes, 0, 1, "distributed", bytes(32), deviations)

    source = NoiseSource(SECRET)
    with NoisePrefetcher(source) as prefetcher:
        kept: list[Tensor] = []
        places = []
        for step in range(4):
            if step % 2:
                prefetcher.expect(deviations)
            prefetcher.start(step, sizes, 0, 1, "distributed", bytes(32))
            drawn = prefetcher.take(step, deviations)
            assert torch.equal(drawn, fresh(step))
            places.append(drawn.data_ptr())
            if step:
                source.give_back(drawn)
            else:
                kept.append(drawn)
        assert torch.equal(kept[0], fresh(0)) and places[0] not in places[1:]  # it was not given back
        assert len(set(places[1:])) == 1
        prefetcher.expect(deviations)
        prefetcher.start(9, sizes, 0, 1, "distributed", bytes(32))
        with pytest.raises(AssertionError, match="other deviations"):
            prefetcher.take(9, [0.5, 1.0])


# ---- gradients and the flat vector


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("way", ["whole", "pieces"])
def test_pieces_add_and_write_what_whole_tensors_do(layout: str, way: str) -> None:
    torch.manual_seed(0)
    shape = (512, 3, 10, 10)
    assert PIECE < 512 * 300
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.randn(shape)
    if layout == "channels_last":
        parameter.grad = parameter.grad.contiguous(memory_format=torch.channels_last)
    values = parameter.grad.clone()
    flat = CounterStream(bytes(32)).normal(values.numel())
    expected = (flat + 0.5 * values.double().reshape(-1)) * (1 / 7)
    gradients = FlatGradients([parameter])
    if way == "whole":
        gradients.add_to(flat, {}, 0.5)
        gradients.write(flat, 7.0)
    else:
        stream = CounterStream(bytes(32))
        none = torch.zeros(0, dtype=torch.float64)
        release = Release(gradients, {}, none, 0.5, 7.0, [len(flat)], [1.0])
        for start, words in words_of([stream.normals(len(flat))], len(flat)):
            release.complete(start, words)
        release.end()
    assert torch.equal(parameter.grad.reshape(-1), expected.float())
    assert parameter.grad.stride() == values.stride()


# ---- the tensors of a model


def test_replaced_and_added_tensors_are_seen() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    watched = WatchedTensors(model)
    before = watched.versions()
    assert before == watched.versions() and list(watched.named()) == list(model.state_dict())
    with torch.no_grad():
        model[1][0].weight.add_(1)
    assert watched.versions() != before
    model[1][0].weight = nn.Parameter(torch.zeros(3, 3))
    assert watched.named()["1.0.weight"] is model[1][0].weight
    model[1].append(nn.BatchNorm1d(3))
    assert list(watched.named()) == [*dict(model.named_parameters()), *dict(model.named_buffers())]
    model[0].register_buffer("mask", torch.ones(3))
    assert "0.mask" in watched.named()
    assert watched.parameters_and_modules()[1] == list(model.modules())
