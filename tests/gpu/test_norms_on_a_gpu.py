"""Norms that are followed on the pretended GPU, and what a step takes over from the projection before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretend import OnGpu, module_to_gpu, pretended_gpu, to_gpu
from private_step import Harness, make_plan, mlp, random_batch
from torch import Tensor

from lipdp_lightning.mechanism.step import Mechanism
from lipdp_lightning.norms import Convolution, Dense, Follower, Operator
from lipdp_lightning.privacy.digests import PendingDigest

CONV = Convolution(padding=1, input_size=(4, 4))


def plain(weight: Tensor) -> Tensor:
    return weight.detach().inner if isinstance(weight, OnGpu) else weight.detach()


def spectral(weight: Tensor) -> float:
    return float(torch.linalg.matrix_norm(plain(weight).double(), 2))


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-3, 1e-2, 0.3])
def test_bounds_are_above_the_truth_and_within_the_slack(
    size: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = {"dense": noise(30, 50, seed=0), "kernel": noise(6, 4, 3, 3, seed=1), "thin": noise(3, 400, seed=2)}
    operators: dict[str, Operator] = {"dense": Dense(), "kernel": CONV, "thin": Dense()}
    follower = Follower(0.2)
    with pretended_gpu(monkeypatch):
        weights = {name: to_gpu(weight.to(dtype)) for name, weight in start.items()}
        for step in range(25):
            follower.begin()
            for name, weight in weights.items():
                bound, exact = (
                    follower.operator_norm(name, weight, operators[name]),
                    operators[name].norm(plain(weight)),
                )
                assert exact * (1 - 2e-3 * (name == "kernel")) * (1 - 1e-12) <= bound <= 1.21 * exact
            follower.clip_({"dense": 9.0, "kernel": 3.0})
            for name, limit in (("dense", 9.0), ("kernel", 3.0)):
                assert operators[name].norm(plain(weights[name])) * (1 - 2e-3) <= follower.bound(name) <= limit
            for name, weight in weights.items():
                weight.add_(to_gpu(size * noise(*weight.shape, seed=10 * step + len(name)).to(dtype)))


class TakenOnTrust(Mechanism):
    """Compares no digest with that of the projection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._digest = SimpleNamespace(begin=lambda named: PendingDigest([b"the same"]))


def after_growth(kind: type[Mechanism], through_data: bool) -> tuple[float, float, bool]:
    """Certified and true norm of the last layer after something enlarges it between steps; whether it is released."""
    torch.manual_seed(0)
    own = Harness(module_to_gpu(mlp()), (12,), make_plan(scaling="joint", max_norm=1.0), kind=kind)
    module_to_gpu(own.module)
    batch = tuple(to_gpu(part, counted=False) for part in random_batch(20, (12,), 5))
    own.release(batch)
    own.mechanism.project_()
    head = own.module.network[-1]
    with torch.no_grad():
        (plain(head.weight) if through_data else head.weight).mul_(3.0)
    own.mechanism.begin_step(1)
    certificate = own.mechanism.certificate
    node = next(n for n in certificate.nodes if n.cotangent == certificate.loss_lipschitz)
    try:
        own.release(batch, 1)
        released = True
    except AssertionError as error:
        assert "weights changed" in str(error)
        released = False
    own.mechanism.close()
    return node.lipschitz[0], spectral(head.weight), released


def test_weights_that_were_changed_by_torch_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_gpu(monkeypatch):
        certified, true, released = after_growth(Mechanism, through_data=False)
    assert certified >= true and released


def test_weights_that_were_changed_without_a_trace_release_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_gpu(monkeypatch):
        certified, true, released = after_growth(Mechanism, through_data=True)
        assert certified < true and not released
        certified, true, released = after_growth(TakenOnTrust, through_data=True)
        assert certified < true and released


def test_the_digest_of_the_sum_comes_with_that_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sealed step waits no more often than others."""
    batch = tuple(to_gpu(part, counted=False) for part in random_batch(20, (12,), 5))
    with pretended_gpu(monkeypatch) as counts:
        torch.manual_seed(0)
        own = Harness(module_to_gpu(mlp()), (12,), make_plan(scaling="joint", max_norm=1.0), kind=Mechanism)
        module_to_gpu(own.module)
        for step in range(2):
            own.mechanism.begin_step(step, sealed=True)
            own.accumulate(batch, step)
            counts.clear()
            own.mechanism.privatize_(step, seal=lambda digest: digest)
            assert counts.waits == 1 + (step == 0)  # at first, a key is copied
            own.mechanism.project_()
        own.mechanism.close()
