"""Contenders train: without noise and with a radius beyond every gradient, all methods take the step of plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lipdp_lightning.bench import contenders, networks
from lipdp_lightning.bench.contenders import OURS, Job, contender_named
from lipdp_lightning.bench.networks import Network, in_plain_torch, network_named
from lipdp_lightning.layers import GroupNorm, InstanceNorm, LayerNorm, MaxMin
from lipdp_lightning.mechanism.step import Mechanism
from lipdp_lightning.models import ConvNet

SHAPE = (1, 8, 8)


class EnoughError(Exception):
    """Ends a contender after its steps."""


def trained(
    name: str, monkeypatch: pytest.MonkeyPatch, steps: int = 3
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights before and after some steps of a contender on a small ConvNet."""
    torch.manual_seed(0)
    model: nn.Module = ConvNet(SHAPE, 3, (4,), hidden=(6,))
    before = [p.detach().clone() for p in model.parameters()]
    monkeypatch.setitem(networks.NETWORKS, "tiny", Network(lambda: model, SHAPE, 3, 64))
    left = steps

    def between() -> None:
        nonlocal left
        if left == 0:
            raise EnoughError
        left -= 1

    with pytest.raises(EnoughError):
        contender_named(name)(Job(name, "tiny", 16), between)
    return before, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", ["opacus", "ghost", "functorch"])
def test_every_method_takes_the_step_of_plain_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "NOISE_MULTIPLIER", 0.0)
    monkeypatch.setattr(contenders, "CLIP_NORM", 1e3)
    # of a fixed rate: the contenders' own follows the size of the gradient, and would hide a wrong one
    monkeypatch.setattr(contenders, "sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    before, expected = trained("torch", monkeypatch)
    _, found = trained(name, monkeypatch)
    for old, plain, other in zip(before, expected, found, strict=True):
        assert not torch.equal(plain, old), "nothing was trained"
        assert (other - plain).norm() < 1e-2 * (plain - old).norm()


def test_clipping_and_noise_are_part_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is not passed by methods that do neither."""
    monkeypatch.setattr(contenders, "CLIP_NORM", 1e-3)
    _, plain = trained("torch", monkeypatch)
    for name in ("opacus", "ghost", "functorch"):
        monkeypatch.setattr(contenders, "NOISE_MULTIPLIER", 0.0)
        before, clipped = trained(name, monkeypatch)
        monkeypatch.setattr(contenders, "NOISE_MULTIPLIER", 1.0)
        _, noised = trained(name, monkeypatch)
        for old, step, quiet, loud in zip(before, plain, clipped, noised, strict=True):
            assert (quiet - step).norm() > 1e-2 * (step - old).norm(), name
            assert (loud - quiet).norm() > 1e-2 * (quiet - old).norm(), name


def test_samples_are_poisson_and_batches_of_one_size() -> None:
    job = Job("torch", "mlp-8x2", 64)
    batches, samples = ([next(rows) for _ in range(40)] for rows in (job.batches(), job.samples()))
    assert {len(rows) for rows in batches} == {64}
    sizes = {len(rows) for rows in samples}
    assert len(sizes) > 10 and 40 < min(sizes) < 64 < max(sizes) < 100
    measured = Job("torch", "mlp-8x2", 64, memory=True)
    again = [next(rows) for rows in [measured.batches()] * 12]
    assert len({len(rows) for rows in again}) <= 6 and all(
        torch.equal(*pair) for pair in zip(again, again[6:], strict=False)
    )


def test_ours_train_under_the_scaling_they_are_named_after(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float | None]] = []
    whole = Mechanism.begin_step

    def recorded(self: Mechanism, *arguments: Any, **options: Any) -> None:
        seen.append((self.plan.scaling, self.plan.loss_clip))
        whole(self, *arguments, **options)

    monkeypatch.setattr(Mechanism, "begin_step", recorded)
    for name in OURS:
        seen.clear()
        before, after = trained(name, monkeypatch)
        assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
        assert {scaling for scaling, _ in seen} == {"worst_case" if name == "loss_clip" else name}
        assert {clip is not None for _, clip in seen} == {name == "loss_clip"}


def test_updates_have_the_size_of_a_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither certificate nor projection has an idle step; the first step only sets the rate."""
    before, still = trained("torch", monkeypatch, steps=1)
    assert all(torch.equal(old, new) for old, new in zip(before, still, strict=True))
    _, moved = trained("torch", monkeypatch, steps=2)
    size = torch.cat([(new - old).flatten() for old, new in zip(before, moved, strict=True)]).norm()
    relative = size / torch.cat([p.flatten() for p in before]).norm()
    assert 0.0004 < relative < 0.01, "the gradient of another batch is not that which has set the rate, but like it"


def test_the_1_6_million_parameters_and_the_families() -> None:
    sizes = {name: sum(p.numel() for p in network_named(name).build().parameters()) for name in networks.NETWORKS}
    assert sizes["convnet-1.6m"] == 1_630_090 and sizes["wrn-16-4"] == 2_747_530
    assert sum(p.numel() for p in network_named("mlp-7x3").build().parameters()) == 2 * 7 * 8 + 7 * 10 + 10
    with pytest.raises(ValueError, match=r"mlp-0x3.*families"):
        network_named("mlp-0x3")


@pytest.mark.parametrize("name", ["convnet-1.6m", "mlp-table", "wrn-16-4"])
def test_plain_torch_has_the_same_network_without_loops_of_the_library(name: str) -> None:
    torch.manual_seed(0)
    network = network_named(name)
    own = network.build()
    plain = in_plain_torch(network.build())
    plain.load_state_dict(own.state_dict())
    assert not any(isinstance(module, MaxMin | GroupNorm) for module in plain.modules())
    x = torch.rand(3, *network.shape)
    torch.testing.assert_close(plain(x), own(x))


@pytest.mark.parametrize("layer", [GroupNorm(2, 4), LayerNorm(), InstanceNorm()], ids=str)
def test_plain_torch_normalises_the_same_groups(layer: GroupNorm) -> None:
    x = torch.randn(3, 4, 5)
    plain = in_plain_torch(nn.Sequential(layer))
    assert not isinstance(plain[0], GroupNorm)  # type: ignore[index]
    torch.testing.assert_close(plain(x), layer(x))
