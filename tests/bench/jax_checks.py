"""The contender jax: its networks are torch's, and its step is that of DP-SGD."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lipdp_lightning.bench import contenders, jax_step, networks
from lipdp_lightning.bench.contenders import Job, contender_named
from lipdp_lightning.bench.networks import Network, in_plain_torch, network_named


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return in_plain_torch(network_named(name).build())


def clipped_by_torch(model: nn.Module, x: torch.Tensor, y: torch.Tensor, radius: float) -> list[torch.Tensor]:
    """Returns the sum over examples of clipped gradients, one backward pass for each."""
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for one, label in zip(x, y, strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(one[None]), label[None]), list(model.parameters()))
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient * min(1.0, radius / (float(norm) + 1e-6))
    return sums


@pytest.mark.parametrize("name", ["convnet-h16", "mlp-12x3"])
@pytest.mark.parametrize("radius", [0.05, 1e3])
def test_sums_of_clipped_gradients_are_those_of_torch(
    name: str, radius: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax_step, "CLIP_NORM", radius)
    model = model_of(name)
    x, y = torch.rand(5, *network_named(name).shape), torch.tensor([0, 3, 1, 9, 2])
    weights = jax_step.weights_of(model)
    found = jax_step.clipped_sums(jax_step.translated(model), weights, x.numpy(), y.numpy())
    for ours, theirs in zip(found, clipped_by_torch(model, x, y, radius), strict=True):
        torch.testing.assert_close(torch.tensor(ours.tolist()), theirs, rtol=1e-4, atol=1e-6)


def test_steps_move_by_the_size_of_an_update_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[Any] = []
    original = jax_step.clipped_sums

    def watched(network: Any, weights: list[Any], x: Any, y: Any) -> list[Any]:
        import jax

        jax.debug.callback(lambda first: norms.append(torch.tensor(first.tolist())), weights[0])
        return original(network, weights, x, y)

    monkeypatch.setattr(jax_step, "clipped_sums", watched)
    model = model_of("mlp-12x3")
    step = jax_step.jax_step(Job("jax", "mlp-12x3", 4), model)
    for _ in range(3):
        step(torch.rand(4, 12), torch.tensor([0, 1, 2, 3]))
    first, second, third = norms
    assert torch.equal(first, second) and 0 < (third - second).norm() < 0.05 * second.norm()


def test_it_runs_as_a_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    class EnoughError(Exception):
        pass

    steps = iter(range(3))

    def between() -> None:
        if next(steps) == 2:
            raise EnoughError

    monkeypatch.setitem(networks.NETWORKS, "tiny", Network(lambda: model_of("mlp-12x2"), (12,), 10, 64))
    with pytest.raises(EnoughError):
        contender_named("jax")(Job("jax", "tiny", 16), between)
    assert "jax" in contenders.CONTENDERS


def test_what_cannot_be_translated_is_named() -> None:
    with pytest.raises(ValueError, match=r"layer WideResNet.*HINT"):
        jax_step.translated(model_of("wrn-10-1"))


def test_without_jax_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lipdp_lightning.extras.is_installed", lambda package: package != "jax")
    with pytest.raises(ValueError, match=r"contender jax needs jax.*lipdp-lightning\[jax\]"):
        jax_step.jax_step(Job("jax", "mlp-12x2", 4), model_of("mlp-12x2"))
    assert "jax" in sys.modules
