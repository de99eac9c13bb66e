"""Networks that hide what they compute: in gradients, in modes, in classes of tensors, in their surroundings."""

from __future__ import annotations

import gc
import inspect
import os
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lipdp_lightning.bounds.certifier import CertificationError, certify
from lipdp_lightning.layers import make_private

GAIN = 1.0
CONTEXT: ContextVar[float] = ContextVar("CONTEXT", default=1.0)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.prepare()

    def prepare(self) -> None:
        pass

    def factor(self, x: Any) -> Any:
        return 1.0

    def forward(self, x: Any) -> Any:
        return self.head(self.layer(x) * self.factor(x))


def traced(x: Any) -> bool:
    return isinstance(x, fx.Proxy)


# ---- gradients and values that operations do not show


class _Louder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 100 * gradient


class HiddenFunction(Base):
    def forward(self, x: Any) -> Any:
        h = self.layer(x)
        return self.head(h if traced(x) else _Louder.apply(h))


class HiddenHookOnAValue(Base):
    def forward(self, x: Any) -> Any:
        h = self.layer(x)
        if not traced(x) and h.requires_grad:
            h.register_hook(lambda g: 100 * g)
        return self.head(h)


class HiddenHookOnANode(Base):
    def forward(self, x: Any) -> Any:
        h = self.layer(x)
        if not traced(x) and h.grad_fn is not None:
            h.grad_fn.register_prehook(lambda g: (100 * g[0],))
        return self.head(h)


class ChangesWhatBackwardReads(Base):
    def forward(self, x: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: 100 * t):
            return self.head(self.layer(x))


class HiddenInGradMode(Base):
    def factor(self, x: Any) -> Any:
        return 1.0 if traced(x) or not torch.is_grad_enabled() else 100.0


class _LouderOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 100 * result if "mm" in str(func) else result


class UnderADispatchMode(Base):
    def forward(self, x: Any) -> Any:
        with _LouderOperations():
            return self.head(self.layer(x))


class _LouderFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 100 * result if func is F.linear else result


class UnderAFunctionMode(Base):
    def forward(self, x: Any) -> Any:
        with _LouderFunctions():
            return self.head(self.layer(x))


class CallsWithOtherWeights(Base):
    def forward(self, x: Any) -> Any:
        weights = {"weight": 128 * self.layer.weight.detach(), "bias": self.layer.bias.detach()}
        return self.head(torch.func.functional_call(self.layer, weights, (x,)))


class ScalesItsWeightForACall(Base):
    def forward(self, x: Any) -> Any:
        if not traced(x):
            self.layer.weight.data.mul_(128)
        h = self.layer(x)
        if not traced(x):
            self.layer.weight.data.div_(128)
        return self.head(h)


class HooksALayerForACall(Base):
    def forward(self, x: Any) -> Any:
        handle = self.layer.register_forward_hook(lambda m, i, o: 100 * o)
        h = self.layer(x)
        handle.remove()
        return self.head(h)


class HooksAllModulesForACall(Base):
    def forward(self, x: Any) -> Any:
        handle = torch.nn.modules.module.register_module_forward_hook(lambda m, i, o: 100 * o)
        try:
            return self.head(self.layer(x))
        finally:
            handle.remove()


class CutsTheGradient(Base):
    """Its gradient is smaller than the bound, but it is not that of the graph."""

    def forward(self, x: Any) -> Any:
        h = self.layer(x)
        with torch.no_grad():
            h = torch.relu(h)
        return self.head(h)


# ---- sizes, modes and surroundings


class CountsExamples(Base):
    def factor(self, x: Any) -> Any:
        return 100.0 if isinstance(x, Tensor) and x.shape[0] > 7 else 1.0


class CountsExamplesByLength(Base):
    def factor(self, x: Any) -> Any:
        return 100.0 if isinstance(x, Tensor) and len(x) > 7 else 1.0


class CountsExamplesByEntries(Base):
    def factor(self, x: Any) -> Any:
        return 100.0 if isinstance(x, Tensor) and x.numel() // 4 == 7 else 1.0


class CountsExamplesByQuotient(Base):
    def factor(self, x: Any) -> Any:
        return 100.0 if isinstance(x, Tensor) and 2 * x.numel() // (x.shape[0] + 1) > 7 else 1.0


class CountsExamplesByRemainder(Base):
    def factor(self, x: Any) -> Any:
        return 100.0 if isinstance(x, Tensor) and x.shape[0] % 8 == 7 else 1.0


class CountsExamplesByBytes(Base):
    def factor(self, x: Any) -> Any:
        return 100.0 if isinstance(x, Tensor) and x.nbytes > 1000 else 1.0


class LooksForAutocast(Base):
    def factor(self, x: Any) -> Any:
        return 100.0 if torch.is_autocast_enabled("cpu") else 1.0


class LooksForACompiler(Base):
    def factor(self, x: Any) -> Any:
        return 100.0 if torch.compiler.is_compiling() else 1.0


class LooksForInference(Base):
    def factor(self, x: Any) -> Any:
        return 100.0 if torch.is_inference_mode_enabled() else 1.0


class ReadsTheEnvironment(Base):
    def factor(self, x: Any) -> Any:
        return float(os.environ.get("LIPDP_GAIN", "1.0"))


class ReadsTheEnvironmentByAFunction(Base):
    def factor(self, x: Any) -> Any:
        return float(os.getenv("LIPDP_GAIN", "1.0"))


class ReadsAFile(Base):
    def factor(self, x: Any) -> Any:
        return 1.0 + len(open(__file__).readline()) * 0.0


class ReadsGlobalsByName(Base):
    def factor(self, x: Any) -> Any:
        return globals()["GA" + "IN"]


class EvaluatesText(Base):
    def factor(self, x: Any) -> Any:
        return eval("GA" + "IN")


class ImportsByName(Base):
    def factor(self, x: Any) -> Any:
        return 100.0 if __import__("ti" + "me").time() > 1e10 else 1.0


class LooksAtItsCaller(Base):
    def factor(self, x: Any) -> Any:
        return 100.0 if sys._getframe(9).f_code.co_name == "fit" else 1.0


class LooksAtTheStack(Base):
    def factor(self, x: Any) -> Any:
        return 100.0 if any(one.function == "training_step" for one in inspect.stack()) else 1.0


class LooksAtItsThread(Base):
    def factor(self, x: Any) -> Any:
        return 100.0 if threading.active_count() > 99 else 1.0


class LooksAtMemory(Base):
    def factor(self, x: Any) -> Any:
        return 100.0 if len(gc.get_objects()) < 10 else 1.0


class ReadsAContext(Base):
    def factor(self, x: Any) -> Any:
        return CONTEXT.get()


# ---- classes of tensors and of modules


class Loud(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return 100 * result if func is F.linear else result


class LoudWeight(Base):
    def prepare(self) -> None:
        self.layer.weight = Loud(torch.ones(4, 4))


class LoudFactor(nn.Parameter):
    def __rmul__(self, other: Any) -> Any:
        return torch.mul(other, 100 * self.detach())


class MultipliesByALoudFactor(Base):
    def prepare(self) -> None:
        self.gain = LoudFactor(torch.ones(4))

    def factor(self, x: Any) -> Any:
        return self.gain


class LoudTensor(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return 100 * result if func in (Tensor.mul, torch.mul) else result


class LoudBuffer(Base):
    def prepare(self) -> None:
        self.register_buffer("gain", torch.ones(4).as_subclass(LoudTensor))

    def factor(self, x: Any) -> Any:
        return self.gain


class LoudCall(Base):
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return 100 * super()._call_impl(*args, **kwargs)


class _LoudLinear(nn.Linear):
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return 100 * super()._call_impl(*args, **kwargs)


class HoldsALoudLayer(Base):
    def prepare(self) -> None:
        self.layer = _LoudLinear(4, 4)


def parametrized() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 3))
    torch.nn.utils.parametrize.register_parametrization(network[0], "weight", nn.Identity())
    return network


def pruned() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 3))
    torch.nn.utils.prune.l1_unstructured(network[0], "weight", 0.5)
    return network


def scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Linear(4, 3)))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Base) and kind is not Base
} | {"parametrized": parametrized, "pruned": pruned, "scripted": scripted}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_hidden_computation_is_refused(name: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(CertificationError, match="HINT"):
        certify(NETWORKS[name](), (4,), 1.0, "hinge")


# ---- harmless


class Settings:
    """Its file is read before the network is made, by a method that forward does not name."""

    gain = 1.0

    def load(self, path: str) -> None:
        with open(path) as file:
            self.gain = float(file.read()) * float(os.environ.get("LIPDP_GAIN", "1"))


class HoldsSettings(Base):
    def prepare(self) -> None:
        self.settings = Settings()

    def factor(self, x: Any) -> Any:
        return self.settings.gain


class ComputesWithSizes(Base):
    def factor(self, x: Any) -> Any:
        return x.numel() / x.shape[0] * x.size(1) / x.dim()

    def forward(self, x: Any) -> Any:
        batch, features = x.shape
        return super().forward(x.view(batch, 2, features // 2).reshape(x.numel() // 4, -1))


class LeavesItsGradientAlone(Base):
    def prepare(self) -> None:
        self.layer.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            h = torch.relu(self.layer(x))
        return self.head(h.detach())


READS: dict[str, tuple[Callable[[Any], Any], float]] = {
    "shape of a weight": (lambda n: 1 / n.layer.weight.shape[1], 1 / 4),
    "size of a weight": (lambda n: 1 / n.layer.weight.size(1), 1 / 4),
    "dimensions of a weight": (lambda n: 1 / n.layer.weight.ndim, 1 / 2),
    "dimensions of a buffer": (lambda n: 1 / (n.gain.dim() + 1), 1 / 2),
    "entries of a buffer": (lambda n: 1 / n.gain.numel(), 1 / 8),
}


@pytest.mark.parametrize("name", READS)
def test_forward_may_read_the_shape_of_a_parameter_or_a_buffer(name: str) -> None:
    read, factor = READS[name]

    class Reads(Base):
        def prepare(self) -> None:
            self.register_buffer("gain", torch.ones(8))

        def forward(self, x: Any) -> Any:
            return self.head(x * read(self))

    network = Reads()
    network.layer.requires_grad_(False)
    use = certify(network, (4,), 1.0, "hinge").group("head").uses[0]
    assert use.input_bound == pytest.approx(factor, rel=1e-5)


@pytest.mark.parametrize("kind", [Base, HoldsSettings, ComputesWithSizes, LeavesItsGradientAlone])
def test_what_hides_nothing_is_certified(kind: type[Base]) -> None:
    torch.manual_seed(0)
    assert "head" in certify(kind(), (4,), 1.0, "hinge").sizes()


def test_a_rehearsal_calls_no_receiver_of_a_mechanism() -> None:
    called: list[Any] = []
    network = make_private(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)))
    network[0].report_to(scaler=called.append, counter=lambda: called.append("used"))
    certify(network, (4,), 1.0, "hinge")
    assert called == [] and network[0].gradient_scaler is not None
