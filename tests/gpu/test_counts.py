"""Private steps on the pretended GPU: the weights of the CPU, and no more launches, waits and bytes than today.

In a steady step, no norm is due: all bounds are followed. If all are due, the weights come to the host once.

The ceilings are what was counted when they were written. Whoever lowers a count lowers its ceiling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretend import KERNELS, module_to_gpu, pretended_gpu, to_cpu, to_gpu
from private_step import make_plan, random_batch
from steps import Taken, take_exact_norms, take_steps

from lipdp_lightning.bench.networks import network_named
from lipdp_lightning.mechanism.scaling import Joint
from lipdp_lightning.studies.gpu_estimate import ON_A_GPU, Launches

PHASES = ("begin", "passes", "release", "optimizer", "projection")
Counted = tuple[int, int, int, int]
"""Launches, waits, bytes to the device, bytes to the host."""

CEILINGS: dict[str, dict[str, Counted]] = {
    "scattering-head": {
        "begin": (0, 0, 0, 0), "passes": (19, 0, 0, 0), "release": (9, 1, 0, 64), "optimizer": (1, 0, 0, 0),
        "projection": (11, 1, 0, 0),
    },
    "convnet-1.6m": {
        "begin": (0, 0, 0, 0), "passes": (41, 0, 0, 0), "release": (16, 1, 0, 64), "optimizer": (8, 0, 0, 0),
        "projection": (16, 1, 0, 0),
    },
    "wrn-16-4": {
        "begin": (0, 0, 0, 0), "passes": (159, 0, 0, 0), "release": (42, 1, 0, 64), "optimizer": (34, 0, 0, 0),
        "projection": (29, 1, 0, 0),
    },
}  # fmt: skip
ALL_DUE: dict[str, Counted] = {
    "scattering-head": (35, 3, 0, 158760), "convnet-1.6m": (50, 3, 0, 6517888), "wrn-16-4": (107, 3, 0, 10981056),
}  # fmt: skip
"""The counts of a projection for which the norms of all weights are evaluated."""
RATIO = {"scattering-head": 5.0, "convnet-1.6m": 2.4, "wrn-16-4": 1.6}
"""Launches of a private step, relative to those of the same step without privacy."""
WITHOUT_PRIVACY = {"scattering-head": 7, "convnet-1.6m": 26, "wrn-16-4": 131}
"""Launches of forward and backward of the same network without privacy; the optimizer's are the same."""
STEPS = 4
CLOSE = {"scattering-head": 1e-7, "convnet-1.6m": 1e-5, "wrn-16-4": 5e-4}
"""Of weights on the two devices, relative, where norms are exact. Followed ones differ, each within its slack."""


def steps_of(name: str, *, on_gpu: bool, steady: bool = False) -> Taken:
    network = network_named(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = network.build()
        for weight in model.parameters():
            if steady and weight.dim() > 1 and not weight.any():  # every change of such a weight is a large one
                torch.nn.init.normal_(weight, std=0.01)
    plan = make_plan(
        scaling="joint", allocation="optimal", projection="clip", max_norm=1.0, expected_batch_size=1024,
        dataset_size=51_200,
    )  # fmt: skip
    batches = [random_batch(4, network.shape, network.outputs, seed=seed) for seed in range(STEPS)]
    return take_steps(model, network.shape, plan, batches, on_gpu=on_gpu, rate=1e-4 if steady else 0.05)


def above(phases: dict[str, Any], ceilings: dict[str, Counted]) -> dict[str, Counted]:
    """Returns the phases that ask more of the device than they may."""
    counted = {name: astuple(phases[name]) for name in PHASES}
    return {n: found for n, found in counted.items() if any(f > c for f, c in zip(found, ceilings[n], strict=True))}


NAMES = [
    pytest.param(name, marks=pytest.mark.slow if name.startswith("wrn") else ()) for name in CEILINGS
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_steady_step_waits_twice_and_never_before_its_release(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_gpu(monkeypatch):
        phases = steps_of(name, on_gpu=True, steady=True).phases
    assert above(phases, CEILINGS[name]) == {}
    assert phases["begin"].waits == phases["passes"].waits == 0 and sum(phases[phase].waits for phase in PHASES) == 2
    private = sum(phases[phase].launches for phase in PHASES)
    assert private <= RATIO[name] * (WITHOUT_PRIVACY[name] + phases["optimizer"].launches)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_cpu_where_norms_are_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_exact_norms(monkeypatch)
    host = steps_of(name, on_gpu=False)
    with pretended_gpu(monkeypatch):
        device = steps_of(name, on_gpu=True)
    apart = max(float((a - b).norm() / a.norm()) for a, b in zip(host.weights, device.weights, strict=True))
    assert apart <= CLOSE[name]
    assert above(device.phases, CEILINGS[name] | {"projection": ALL_DUE[name]}) == {}


@pytest.mark.parametrize("name", NAMES)
def test_the_launches_of_the_same_network_without_privacy_are_those_on_the_page(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = network_named(name)
    x, y, _ = random_batch(4, network.shape, network.outputs)
    with pretended_gpu(monkeypatch) as counts:
        model = module_to_gpu(network.build())
        for _ in range(2):
            model.zero_grad()
            counts.clear()
            torch.nn.functional.cross_entropy(model(to_gpu(x, counted=False)), to_gpu(y, counted=False)).backward()
    assert counts.launches == WITHOUT_PRIVACY[name]


@pytest.mark.parametrize("name", CEILINGS)
def test_the_estimate_takes_what_is_counted_here(name: str) -> None:
    own = [CEILINGS[name][phase] for phase in ("begin", "release", "projection")]
    passes, waits = CEILINGS[name]["passes"][0], sum(phase[1] for phase in CEILINGS[name].values())
    assert ON_A_GPU[name] == Launches(passes, sum(p[0] for p in own), waits, WITHOUT_PRIVACY[name])


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Noise is drawn on the host and copied, and the hash is torch's."""
    with pretended_gpu(monkeypatch, kernels=None):
        yield


def test_without_triton_the_weights_are_the_same_and_noise_is_copied(
    without_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, device = steps_of("scattering-head", on_gpu=False), steps_of("scattering-head", on_gpu=True)
    assert torch.equal(host.weights[-1], device.weights[-1])
    assert device.phases["release"].to_device == 8 * 3969 * 10
    assert "release" in above(device.phases, CEILINGS["scattering-head"])


def test_a_tensor_that_is_left_on_the_host_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Joint.example_factor
    monkeypatch.setattr(Joint, "example_factor", lambda self, *given: to_cpu(true(self, *given)))
    with pretended_gpu(monkeypatch), pytest.raises(RuntimeError, match="same device"):
        steps_of("scattering-head", on_gpu=True)


def test_noise_of_another_deviation_fails_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    def release_(values: Any, key: bytes, deviation: float, **given: Any) -> None:
        KERNELS.release_(values, key, deviation * 1.001, **given)

    host = steps_of("scattering-head", on_gpu=False)
    with pretended_gpu(monkeypatch, SimpleNamespace(release_=release_, row_sums=KERNELS.row_sums)):
        device = steps_of("scattering-head", on_gpu=True)
    assert float((host.weights[-1] - device.weights[-1]).norm() / host.weights[-1].norm()) > 1e-4
