"""A rehearsal on the pretended GPU: scalings, precisions, views, a resume, an empty sample and two ranks.

Every run ends with the weights of the CPU. Faults of a device that are planted on purpose are found, by an error or by
other weights.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretend import OnGpu, module_to_gpu, pretended_gpu, to_cpu, to_gpu
from private_step import NETWORKS, SECRET, Harness, make_plan, random_batch
from steps import SameNoise, take_exact_norms
from torch import Tensor

from lipdp_lightning.augmentations import HorizontalFlip
from lipdp_lightning.kernels import rows
from lipdp_lightning.layers import scaled
from lipdp_lightning.mechanism.noise import Place
from lipdp_lightning.mechanism.scaling import Joint
from lipdp_lightning.norms import follow
from lipdp_lightning.training.views import Views

BUILD, SHAPE = NETWORKS["convnet"]
SCALINGS: dict[str, dict[str, Any]] = {
    "joint": {"scaling": "joint"}, "layerwise": {"scaling": "layerwise"}, "worst_case": {"scaling": "worst_case"},
    "exact": {"scaling": "exact", "radius": 1.0}, "radius": {"scaling": "radius", "radius": 1.0},
}  # fmt: skip
PRECISIONS = {"float32": torch.float32, "float64": torch.float64}
CLOSE = 1e-6
"""How far the weights may be apart, relative, where norms are exact; followed ones differ, each within its slack."""

SIZES = (12, 0, 9)


class Rehearsed:
    """The processes of a run, one after the other, all on one device."""

    def __init__(self, options: Mapping[str, Any], precision: str, views: int, ranks: int, on_gpu: bool) -> None:
        self.on_gpu, self.dtype = on_gpu, PRECISIONS[precision]
        self._plan = make_plan(expected_batch_size=100, dataset_size=5000, **options)
        self._views, self._ranks = views, ranks
        self.processes = [self._process(rank) for rank in range(ranks)]

    def _process(self, rank: int) -> Harness:
        torch.manual_seed(0)
        network = BUILD().to(self.dtype)
        harness = Harness(
            module_to_gpu(network) if self.on_gpu else network, SHAPE, self._plan, secret=SECRET,
            kind=partial(SameNoise, views=self._views), place=Place(rank, self._ranks),  # type: ignore[arg-type]
        )  # fmt: skip
        if self.on_gpu:
            module_to_gpu(harness.module)
        harness.module._dtype = self.dtype  # as Lightning sets it
        strategy: Any = harness.module.trainer.strategy
        strategy.views = Views(self._views, [HorizontalFlip()]) if self._views > 1 else None
        strategy.step_key = lambda purpose, *indices: hash((purpose, *indices)) % 1000
        return harness

    def step(self, number: int, size: int) -> None:
        """Takes one step of all processes; each has every W-th example."""
        batch = random_batch(size, SHAPE, 5, seed=number)
        for rank, one in enumerate(self.processes):
            own = tuple(part[rank :: self._ranks] for part in batch)
            one.accumulate(tuple(to_gpu(part, counted=False) for part in own) if self.on_gpu else own, number)
        handed_over: list[Tensor] = []
        for one in self.processes[:0:-1]:
            one.mechanism.privatize_(number, lambda total: handed_over.append(total.clone()))
        first = self.processes[0]
        reduce = (lambda total: [total.add_(other) for other in handed_over]) if self._ranks > 1 else None
        first.mechanism.privatize_(number, reduce)
        torch.optim.SGD(first.module.network.parameters(), lr=0.05).step()
        first.mechanism.project_()
        for one in self.processes[1:]:
            with torch.no_grad():
                for own, other in zip(one.module.parameters(), first.module.parameters(), strict=True):
                    own.copy_(other)
            one.mechanism.project_()

    def resume(self) -> None:
        """Replaces every process by one that continues from its weights and its state."""
        for rank, old in enumerate(self.processes):
            new = self._process(rank)
            with torch.no_grad():
                for own, other in zip(new.module.parameters(), old.module.parameters(), strict=True):
                    own.copy_(other)
            new.mechanism.load_state(old.mechanism.state())
            new.mechanism._follower.load_state(copy.deepcopy(old.mechanism._follower.state()))
            self.processes[rank] = new

    def weights(self) -> Tensor:
        held = [p.detach() for p in self.processes[0].module.network.parameters()]
        return torch.cat([(p.inner if isinstance(p, OnGpu) else p).flatten().double() for p in held])


def rehearse(options: Mapping[str, Any], precision: str, views: int, ranks: int, resumed: bool, on_gpu: bool) -> Tensor:
    run = Rehearsed(options, precision, views, ranks, on_gpu)
    for number, size in enumerate(SIZES):
        if resumed and number == 2:
            run.resume()
        run.step(number, size)
    return run.weights()


def apart(patch: pytest.MonkeyPatch, scaling: str, precision: str, views: int, ranks: int, resumed: bool) -> float:
    """The relative distance of the weights on the two devices, where the norms of all that has moved are exact."""
    options = SCALINGS[scaling]
    take_exact_norms(patch)
    host = rehearse(options, precision, views, ranks, False, on_gpu=False)
    with pretended_gpu(patch):
        device = rehearse(options, precision, views, ranks, resumed, on_gpu=True)
    return float((host - device).norm() / host.norm())


FAST = {("joint", "float32", 2, 2, True), ("layerwise", "float64", 1, 2, True), ("exact", "float32", 2, 1, False)}
ALL = list(itertools.product(SCALINGS, PRECISIONS, (1, 2), (1, 2), (False, True)))


@pytest.mark.parametrize(
    ("scaling", "precision", "views", "ranks", "resumed"),
    [case if case in FAST else pytest.param(*case, marks=pytest.mark.slow) for case in ALL],
)
def test_a_run_ends_with_the_weights_of_the_cpu(
    scaling: str, precision: str, views: int, ranks: int, resumed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert apart(monkeypatch, scaling, precision, views, ranks, resumed) <= CLOSE


# ---- planted faults


def factors_on_the_host(patch: pytest.MonkeyPatch) -> None:
    true = Joint.example_factor
    patch.setattr(Joint, "example_factor", lambda self, *given: to_cpu(true(self, *given)))


def coverage_on_the_host(patch: pytest.MonkeyPatch) -> None:
    true = scaled._coverage
    patch.setattr(scaled, "_coverage", lambda *given: (lambda c, p: (to_cpu(c), p))(*true(*given)))


def views_numbered_on_the_host(patch: pytest.MonkeyPatch) -> None:
    true = torch.arange
    there = "lipdp_lightning.training.views.torch"
    patch.setattr(there, SimpleNamespace(**vars(torch) | {"arange": lambda n, **_: true(n)}))


def loops_read_the_device(patch: pytest.MonkeyPatch) -> None:
    """A loop would read an address of the device: here it is refused by what hands tensors to it."""
    patch.setattr(rows, "usable", lambda *tensors: True)


def no_noise(patch: pytest.MonkeyPatch) -> None:
    import pretend

    patch.setattr(pretend.KERNELS, "release_", lambda values, *_, factor=1.0, **__: values.mul_(factor))


def stale_weights(patch: pytest.MonkeyPatch) -> None:
    """Norms that are never measured again: a copy to the host that is taken once."""
    true = follow.Follower.operator_norm
    known: dict[str, float] = {}
    patch.setattr(
        follow.Follower, "operator_norm",
        lambda self, name, *given, **more: known.setdefault(name, 0.5 * true(self, name, *given, **more)),
    )  # fmt: skip


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "factors stay on the host": factors_on_the_host,
    "the coverage stays on the host": coverage_on_the_host,
    "views are numbered on the host": views_numbered_on_the_host,
    "loops read what lies on the device": loops_read_the_device,
    "the kernel adds no noise": no_noise,
    "norms are half of what they are": stale_weights,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_exact_norms(monkeypatch)
    host = rehearse(SCALINGS["joint"], "float32", 2, 1, False, on_gpu=False)
    found = False
    with pretended_gpu(monkeypatch), monkeypatch.context() as planted:
        FAULTS[fault](planted)
        try:
            device = rehearse(SCALINGS["joint"], "float32", 2, 1, False, on_gpu=True)
            found = float((host - device).norm() / host.norm()) > 100 * CLOSE
        except (RuntimeError, AssertionError, TypeError, ValueError):
            found = True
    assert found
