"""Networks that compute something else than what tracing sees: refused when they are certified, or bounded."""

from __future__ import annotations

import datetime
import itertools
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lipdp_lightning.bounds.certifier import CertificationError, Certifier, certify
from lipdp_lightning.bounds.identity import TrustedHook
from lipdp_lightning.bounds.registry import Unbounded

CALLS = [0]
STEPS = itertools.count()
KEPT_ALIVE: list[Any] = []


class Base(nn.Module):
    """A linear layer whose input is made a hundred times larger where tracing does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("gain", torch.ones(4))
        self.prepare()

    def prepare(self) -> None:
        pass

    def factor(self, x: Any) -> Any:
        return 1.0

    def forward(self, x: Any) -> Any:
        return self.layer(x * self.factor(x))


class LooksForProxies(Base):
    def factor(self, x: Any) -> Any:
        return 1.0 if isinstance(x, fx.Proxy) else 100.0


class LooksForTensors(Base):
    def factor(self, x: Any) -> Any:
        return 100.0 if isinstance(x, Tensor) else 1.0


class LooksForTracing(Base):
    def factor(self, x: Any) -> Any:
        return 1.0 if torch.fx._symbolic_trace.is_fx_tracing() else 100.0


class LooksAtValuesOfTensorsAlone(Base):
    """The graph's zeros and the rehearsal's inputs would not show it."""

    def factor(self, x: Any) -> Any:
        return 100.0 if isinstance(x, Tensor) and x.sum() > 1e6 else 1.0


class CountsCalls(Base):
    def prepare(self) -> None:
        self.calls = 0

    def factor(self, x: Any) -> Any:
        self.calls += 1
        return 1.0 if self.calls < 1000 else 100.0


class CountsCallsInAList(CountsCalls):
    def prepare(self) -> None:
        self.state = [0]

    def factor(self, x: Any) -> Any:
        self.state[0] += 1
        return 1.0 if self.state[0] < 1000 else 100.0


class CountsCallsElsewhere(Base):
    def factor(self, x: Any) -> Any:
        CALLS[0] += 1
        return 1.0 if CALLS[0] < 1000 else 100.0


class DependsOnGradMode(Base):
    def factor(self, x: Any) -> Any:
        return 1.0 if torch.is_grad_enabled() else 100.0


class DrawsInPython(Base):
    def factor(self, x: Any) -> Any:
        return 1.0 + random.random()


class DrawsRarely(Base):
    def factor(self, x: Any) -> Any:
        return 100.0 if random.random() > 1 - 1e-9 else 1.0


class DrawsInNumpy(Base):
    def factor(self, x: Any) -> Any:
        return 1.0 + float(np.random.rand())


class DrawsInTorch(Base):
    def factor(self, x: Any) -> Any:
        return 1.0 if isinstance(x, fx.Proxy) else torch.rand(())


class DrawsLikeABuffer(Base):
    def factor(self, x: Any) -> Any:
        return torch.rand_like(self.gain)


class ReadsTheClock(Base):
    def factor(self, x: Any) -> Any:
        return 1.0 + time.time() % 1


class WaitsForADate(Base):
    def factor(self, x: Any) -> Any:
        return 100.0 if time.time() > 1e10 else 1.0


class WaitsForADay(Base):
    def factor(self, x: Any) -> Any:
        return 100.0 if datetime.date.today().year > 2100 else 1.0


class WaitsByALocalImport(Base):
    def factor(self, x: Any) -> Any:
        from time import monotonic as now

        return 100.0 if now() > 1e12 else 1.0


class WaitsByAHelper(Base):
    def prepare(self) -> None:
        self.clock = time.perf_counter

    def factor(self, x: Any) -> Any:
        return 100.0 if self.clock() > 1e12 else 1.0


class CountsByAnIterator(Base):
    def prepare(self) -> None:
        self.calls = itertools.count()

    def factor(self, x: Any) -> Any:
        return 1.0 if next(self.calls) < 1000 else 100.0


class DrawsAName(Base):
    def factor(self, x: Any) -> Any:
        return 100.0 if uuid4().int < 2**90 else 1.0


class CountsInALoop(Base):
    """Nothing in its code names ``__iter__``."""

    def __iter__(self) -> Any:
        yield 1.0 if next(STEPS) < 1000 else 100.0

    def factor(self, x: Any) -> Any:
        return max(factor for factor in self)


class DrawsFromItsOwnSource(Base):
    def prepare(self) -> None:
        self.source = random.Random(0)

    def factor(self, x: Any) -> Any:
        return 100.0 if self.source.random() > 1 - 1e-9 else 1.0


class ReadsAnotherMode(Base):
    def prepare(self) -> None:
        self.drop.eval()

    def factor(self, x: Any) -> Any:
        return 1.0 if self.drop.training == self.training else 100.0


class ReadsABuffer(Base):
    def factor(self, x: Any) -> Any:
        return float(self.gain[0])


class ReadsABufferAsAnItem(Base):
    def factor(self, x: Any) -> Any:
        return self.gain.max().item()


class ReadsABufferAsAList(Base):
    def factor(self, x: Any) -> Any:
        return max(self.gain.tolist())


class ReadsItsWeight(Base):
    def factor(self, x: Any) -> Any:
        return float(self.layer.weight.detach().norm())


class UpdatesABuffer(Base):
    def factor(self, x: Any) -> Any:
        self.gain += 1.0
        return 1.0


class UpdatesABufferByItsData(Base):
    def factor(self, x: Any) -> Any:
        if not isinstance(x, fx.Proxy):
            self.gain.data.add_(1.0)
        return 1.0


class SwitchesGradientsOff(Base):
    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            first = self.layer(x)
        return first + self.layer(x)


class KeepsItsOutput(Base):
    def forward(self, x: Any) -> Any:
        self.last = super().forward(x)
        return self.last


class HoldsASlice(Base):
    def prepare(self) -> None:
        self.source = nn.Parameter(torch.ones(8))
        self.part = self.source[:4]

    def factor(self, x: Any) -> Any:
        return self.part


class HoldsATransposedWeight(Base):
    def prepare(self) -> None:
        self.turned = [self.layer.weight.t()]

    def forward(self, x: Any) -> Any:
        return super().forward(x) + x @ self.turned[0]


class HoldsATensorThatNeedsGradients(Base):
    def prepare(self) -> None:
        self.table = {"factor": torch.ones(4, requires_grad=True)}

    def factor(self, x: Any) -> Any:
        return self.table["factor"]


class HoldsItInAnObject(Base):
    def prepare(self) -> None:
        self.settings = SimpleNamespace(factor=2 * self.layer.bias[:1])

    def factor(self, x: Any) -> Any:
        return self.settings.factor


class HoldsItAmongParameters(Base):
    def prepare(self) -> None:
        self.source = nn.Parameter(torch.ones(3, 4))
        self.layer._parameters["weight"] = 2 * self.source  # type: ignore[assignment]


class MultipliesByItsWeight(Base):
    """The product's gradient in the weight is bounded by no rule."""

    def factor(self, x: Any) -> Any:
        return self.layer.weight.norm()


def helper(x: Any) -> Any:
    return x


class Plain(Base):
    pass


def with_hook(kind: str, on: Callable[[nn.Module], nn.Module], hook: Callable[..., Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        network = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 3))
        getattr(on(network), kind)(hook)
        return network

    return build


def _root(network: nn.Module) -> nn.Module:
    return network


def _inner(network: nn.Module) -> nn.Module:
    return network[0]  # type: ignore[index, no-any-return]


def replaced_forward() -> nn.Module:
    network = Base()
    network.forward = lambda x: 100 * network.layer(x)  # type: ignore[method-assign]
    return network


def replaced_call() -> nn.Module:
    network = Base()
    network._compiled_call_impl = lambda x: 100 * network.layer(x)
    return network


def weight_norm() -> nn.Module:
    return nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(4, 3)))


def spectral_norm() -> nn.Module:
    return nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(4, 3)))


def hooked_parameter() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 3))
    network[0].weight.register_hook(lambda g: 100 * g)
    return network


def accumulating() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 3))
    network[0].weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(100))
    return network


def hooked_accumulator(kind: str) -> Callable[[], nn.Module]:
    """A hook on the node that adds to ``grad``: the parameter itself does not show it."""

    def build() -> nn.Module:
        network = nn.Sequential(nn.Linear(4, 3))
        weight = network[0].weight
        node = weight.view_as(weight).grad_fn.next_functions[0][0]
        getattr(node, kind)(lambda gradients, *_: None)
        KEPT_ALIVE[:] = [node]
        return network

    return build


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        LooksForProxies, LooksForTensors, LooksForTracing, LooksAtValuesOfTensorsAlone, CountsCalls,
        CountsCallsInAList, CountsCallsElsewhere, DependsOnGradMode, DrawsInPython, DrawsRarely, DrawsInNumpy,
        DrawsInTorch, DrawsLikeABuffer, ReadsTheClock, WaitsForADate, WaitsForADay, WaitsByALocalImport,
        WaitsByAHelper, CountsByAnIterator, CountsInALoop, DrawsFromItsOwnSource, DrawsAName,
        ReadsAnotherMode, ReadsABuffer, ReadsABufferAsAnItem,
        ReadsABufferAsAList, ReadsItsWeight, UpdatesABuffer, UpdatesABufferByItsData, SwitchesGradientsOff,
        KeepsItsOutput, HoldsASlice, HoldsATransposedWeight, HoldsATensorThatNeedsGradients, HoldsItInAnObject,
        HoldsItAmongParameters, MultipliesByItsWeight,
    )
} | {
    "forward hook on the root": with_hook("register_forward_hook", _root, lambda m, i, o: 100 * o),
    "forward hook inside": with_hook("register_forward_hook", _inner, lambda m, i, o: 100 * o),
    "pre-hook on the root": with_hook("register_forward_pre_hook", _root, lambda m, i: (100 * i[0],)),
    "pre-hook inside": with_hook("register_forward_pre_hook", _inner, lambda m, i: None),
    "backward hook": with_hook("register_full_backward_hook", _root, lambda m, i, o: None),
    "backward pre-hook": with_hook("register_full_backward_pre_hook", _inner, lambda m, o: (100 * o[0],)),
    "forward of the instance": replaced_forward,
    "call of the instance": replaced_call,
    "old weight norm": weight_norm,
    "old spectral norm": spectral_norm,
    "hook on a parameter": hooked_parameter,
    "hook after accumulation": accumulating,
    "hook on an accumulator": hooked_accumulator("register_hook"),
    "pre-hook on an accumulator": hooked_accumulator("register_prehook"),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_that_tracing_does_not_see_through_is_refused(name: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(CertificationError, match="HINT"):
        certify(NETWORKS[name](), (4,), 1.0, "hinge")


def test_hooks_for_all_modules_are_refused() -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, i, o: 100 * o)
    try:
        with pytest.raises(CertificationError, match=r"hook for all modules.*HINT"):
            certify(nn.Sequential(nn.Linear(4, 3)), (4,), 1.0, "hinge")
    finally:
        handle.remove()


# ---- what may be read: values that forward computes from buffers and detached weights follow them


class ScaledByABuffer(Base):
    def factor(self, x: Any) -> Any:
        return 2 * self.gain.abs().max()


class ScaledByItsNorm(Base):
    def factor(self, x: Any) -> Any:
        return self.layer.weight.detach().norm()


class ScaledByAView(Base):
    def factor(self, x: Any) -> Any:
        return self.gain.view(1, -1)


def larger(network: Any) -> None:
    with torch.no_grad():
        network.gain.mul_(100)
        network.layer.weight.mul_(100)


@pytest.mark.parametrize("kind", [ScaledByABuffer, ScaledByItsNorm, ScaledByAView])
def test_what_forward_computes_from_buffers_and_weights_is_worked_out_for_every_certificate(kind: type[Base]) -> None:
    torch.manual_seed(0)
    network = kind()
    certifier = Certifier(network, (4,), 1.0, "hinge")
    before = certifier.certify().group("layer").worst_case
    larger(network)
    x = F.normalize(torch.randn(64, 4), dim=1)
    after = certifier.certify()
    fed = (x * network.factor(x)).norm(dim=1).max().item()
    assert after.group("layer").uses[0].input_bound >= fed * (1 - 1e-6)
    assert after.group("layer").worst_case > 50 * before


def test_tracing_leaves_nothing_on_the_network() -> None:
    class WithConstants(Base):
        def factor(self, x: Any) -> Any:
            return torch.full((4,), 0.5)

    network = WithConstants()
    before = set(vars(network))
    certifier = Certifier(network, (4,), 1.0, "hinge")
    assert certifier.certify().group("layer").uses[0].input_bound == pytest.approx(0.5, rel=1e-5)
    assert set(vars(network)) == before


# ---- harmless


def test_state_dict_hooks_compiled_calls_and_trusted_hooks_are_no_obstacle() -> None:
    seen: list[int] = []
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    expected = certify(network, (4,), 1.0, "hinge")
    network.register_state_dict_pre_hook(lambda *_: None)
    network._register_state_dict_hook(lambda module, state, prefix, meta: None)
    network.compile(backend="eager")
    network[1].register_forward_hook(TrustedHook(lambda m, i, o: seen.append(1)))
    assert certify(network, (4,), 1.0, "hinge") == expected


def test_a_name_of_an_attribute_is_no_clock() -> None:
    class HasATime(Base):
        def prepare(self) -> None:
            self.time, self.random = 1.0, nn.Identity()

        def factor(self, x: Any) -> Any:
            return self.time

        def forward(self, x: Any) -> Any:
            return super().forward(self.random(x))

    assert certify(HasATime(), (4,), 1.0, "hinge").groups[0].name == "layer"


def test_a_graph_that_is_kept_is_no_obstacle() -> None:
    network = nn.Sequential(nn.Linear(4, 3))
    kept = network(torch.ones(2, 4))
    assert certify(network, (4,), 1.0, "hinge").groups[0].name == "0"
    assert kept.requires_grad


def test_a_network_is_certified_in_inference_mode_too() -> None:
    network = nn.Sequential(nn.Linear(4, 3))
    with torch.inference_mode():
        assert certify(network, (4,), 1.0, "hinge") == certify(network, (4,), 1.0, "hinge")


def test_a_frozen_part_may_be_run_without_gradients() -> None:
    class Head(Base):
        def prepare(self) -> None:
            self.frozen = nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                features = self.frozen(x)
            return self.layer(features)

    assert certify(Head(), (4,), 1.0, "hinge").groups[0].name == "layer"


def test_an_unbounded_constant_says_why() -> None:
    assert issubclass(Unbounded, Exception)
    with pytest.raises(CertificationError, match=r"computes from a trained parameter.*HINT"):
        certify(MultipliesByItsWeight(), (4,), 1.0, "hinge")
