"""Networks that behave while they are watched: refused, or without effect, since a step runs the certified graph."""

from __future__ import annotations

import copy
import ctypes
import math
import operator
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from private_step import Harness, make_plan, random_batch
from torch import Tensor, fx, nn

from lipdp_lightning.bounds.certifier import CertificationError
from lipdp_lightning.bounds.identity import TrustedHook

GAINS = [1.0] * 7 + [100.0] * 1000


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("gain", torch.ones(4))
        self.prepare()

    def prepare(self) -> None:
        pass

    def loud(self, x: Any) -> Any:
        """Tells whether to be loud on a tensor."""
        return False

    def factor(self, x: Any) -> Any:
        return 100.0 if isinstance(x, Tensor) and self.loud(x) else 1.0

    def forward(self, x: Any) -> Any:
        return self.head(self.layer(x) * self.factor(x))


# ---- the size of the batch, read where no comparison shows it


class CountsByIndex(Base):
    def factor(self, x: Any) -> Any:
        return GAINS[x.shape[0]] if isinstance(x, Tensor) else 1.0


class CountsByRange(Base):
    def loud(self, x: Tensor) -> bool:
        return len(range(x.shape[0])) > 7


class CountsBySlice(Base):
    def loud(self, x: Tensor) -> bool:
        return bool(GAINS[7 : x.shape[0]])


class CountsByBits(Base):
    def loud(self, x: Tensor) -> bool:
        return x.shape[0].bit_length() > 3


class CountsByShift(Base):
    def loud(self, x: Tensor) -> bool:
        return bool([1.0][: x.shape[0] >> 3])


class CountsByText(Base):
    def loud(self, x: Tensor) -> bool:
        return len(f"{x.shape[0]}") > 1


class CountsByRepr(Base):
    def loud(self, x: Tensor) -> bool:
        return len(repr(x.shape)) > 18


class CountsByLogarithm(Base):
    def loud(self, x: Tensor) -> bool:
        return math.log(x.shape[0]) > 2


class CountsByRoot(Base):
    def loud(self, x: Tensor) -> bool:
        return math.isqrt(x.shape[0]) > 2


class CountsByRepetition(Base):
    def loud(self, x: Tensor) -> bool:
        return len("." * x.shape[0]) > 7


class CountsByAShapesEntries(Base):
    def loud(self, x: Tensor) -> bool:
        return x.shape.numel() > 28


class CountsByANewTensor(Base):
    def loud(self, x: Tensor) -> bool:
        return torch.zeros(x.shape[0]).numel() > 7


class CountsByANewArray(Base):
    def loud(self, x: Tensor) -> bool:
        return np.zeros(x.shape[0]).size > 7


class CountsByComparingShapes(Base):
    def loud(self, x: Tensor) -> bool:
        return torch.is_same_size(x, torch.ones(8, 4))


class CountsByAnIndex(Base):
    def loud(self, x: Tensor) -> bool:
        return operator.index(x.shape[0]).__class__ is int and int.__gt__(x.shape[0], 7)


class CountsByStride(Base):
    def loud(self, x: Tensor) -> bool:
        return max(x.mT.contiguous().stride()) > 7


class CountsByDivisionWithRemainder(Base):
    def loud(self, x: Tensor) -> bool:
        return bool(GAINS[0 : divmod(x.shape[0], 8)[0]])


class CountsPlainNumbersAlone(Base):
    """A marked number has a class of its own."""

    def loud(self, x: Tensor) -> bool:
        return type(x.shape[0]) is int and x.shape[0] > 7


# ---- values that are read by other ways than item()


class ReadsByDlpack(Base):
    def loud(self, x: Tensor) -> bool:
        return float(np.from_dlpack(x).max()) > 1e6


class ReadsByACapsule(Base):
    def loud(self, x: Tensor) -> bool:
        return float(torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)).max()) > 1e6


class ReadsByText(Base):
    def loud(self, x: Tensor) -> bool:
        return "e+0" in repr(x)


class ReadsByFormat(Base):
    def loud(self, x: Tensor) -> bool:
        return "e+0" in f"{x}"


class ReadsByPickle(Base):
    def loud(self, x: Tensor) -> bool:
        return len(pickle.dumps(x)) > 10_000


class ReadsByAnAddress(Base):
    def loud(self, x: Tensor) -> bool:
        return ctypes.c_float.from_address(x._cdata).value > 1e30


class ReadsByCopy(Base):
    def loud(self, x: Tensor) -> bool:
        return float(copy.copy(x).sum()) > 1e6


class ReadsTheGradient(Base):
    def loud(self, x: Tensor) -> bool:
        return self.layer._parameters["weight"].grad is not None


class ReadsTheVersion(Base):
    def loud(self, x: Tensor) -> bool:
        return self.layer._parameters["weight"]._version > 100


class ReadsTheBase(Base):
    def loud(self, x: Tensor) -> bool:
        return x._base is not None


class ReadsTheLayout(Base):
    def loud(self, x: Tensor) -> bool:
        return not x.is_contiguous()


class ReadsTheOffset(Base):
    def loud(self, x: Tensor) -> bool:
        return x.storage_offset() > 0


class ReadsTheOrderOfCreation(Base):
    def loud(self, x: Tensor) -> bool:
        h = self.layer._parameters["weight"].t()
        return h.grad_fn is not None and h.grad_fn._sequence_nr() > 10_000


class SharesMemory(Base):
    def loud(self, x: Tensor) -> bool:
        return x.is_set_to(self._buffers["gain"])


# ---- who notices that it is watched, and keeps it to itself


class SwallowsTheRefusal(Base):
    def loud(self, x: Tensor) -> bool:
        try:
            return bool(x.sum() > 1e6)
        except Exception:
            return False


class SwallowsTheRefusalOfASize(Base):
    def loud(self, x: Tensor) -> bool:
        try:
            return x.shape[0] > 7
        except BaseException:
            return False


class SwallowsTheRefusalOfAParameter(Base):
    def loud(self, x: Tensor) -> bool:
        try:
            return self.layer._parameters["weight"].norm().item() > 100
        except:  # noqa: E722
            return False


class LooksForAFunctionMode(Base):
    def loud(self, x: Tensor) -> bool:
        return torch._C._len_torch_function_stack() == 0


class LooksForOverrides(Base):
    def loud(self, x: Tensor) -> bool:
        return not torch.overrides._get_current_function_mode_stack()


class LooksForThePatchedCall(Base):
    def loud(self, x: Tensor) -> bool:
        return "lambda" not in nn.Module.__dict__["__call__"].__qualname__


class LooksForTheGraph(Base):
    def loud(self, x: Tensor) -> bool:
        return not isinstance(x, fx.Proxy) and x.device.type == "cpu" and x.shape[1] == 4


class RunsBackward(Base):
    def factor(self, x: Any) -> Any:
        if isinstance(x, Tensor) and torch.is_grad_enabled():
            (self.layer._parameters["weight"].sum() * x.shape[0]).backward()
        return 1.0


# ---- surroundings


class ReadsTheDefaultDtype(Base):
    def loud(self, x: Tensor) -> bool:
        return torch.get_default_dtype() == torch.float64


class ReadsDeterminism(Base):
    def loud(self, x: Tensor) -> bool:
        return torch.are_deterministic_algorithms_enabled()


class ReadsMatmulPrecision(Base):
    def loud(self, x: Tensor) -> bool:
        return torch.get_float32_matmul_precision() == "medium"


class ReadsABackend(Base):
    def loud(self, x: Tensor) -> bool:
        return not torch.backends.mkldnn.enabled


class ReadsAnomalyMode(Base):
    def loud(self, x: Tensor) -> bool:
        return torch.is_anomaly_enabled()


class ReadsTheProcessGroup(Base):
    def loud(self, x: Tensor) -> bool:
        return torch.distributed.is_initialized()


class ReadsTheDefaultDevice(Base):
    def loud(self, x: Tensor) -> bool:
        return torch.get_default_device().type == "meta"


class ReadsADefaultGenerator(Base):
    def loud(self, x: Tensor) -> bool:
        return torch.default_generator.initial_seed() == 5


class ReadsItsGenerator(Base):
    def prepare(self) -> None:
        self.source = torch.Generator()

    def loud(self, x: Tensor) -> bool:
        return self.source.initial_seed() == 5


class IndexesByItsGenerator(Base):
    def prepare(self) -> None:
        self.source = torch.Generator()

    def factor(self, x: Any) -> Any:
        return GAINS[torch.randint(10**9, (), generator=self.source) // 10**8]


class ReadsTheStateOfNumpy(Base):
    def loud(self, x: Tensor) -> bool:
        return np.random.get_state()[2] == 5


class HoldsARandomState(Base):
    def prepare(self) -> None:
        self.source = np.random.RandomState(0)

    def loud(self, x: Tensor) -> bool:
        return self.source.rand() > 1 - 1e-9


class ReadsASignal(Base):
    def loud(self, x: Tensor) -> bool:
        return signal.getitimer(signal.ITIMER_REAL)[0] > 0


class ReadsATemporaryFile(Base):
    def loud(self, x: Tensor) -> bool:
        return tempfile.gettempdir() == "/loud"


class HoldsAFile(Base):
    def prepare(self) -> None:
        self.file = BytesIO(b"\x01")

    def loud(self, x: Tensor) -> bool:
        return self.file.getvalue() != b"\x01"


class ReadsAnArrayFile(Base):
    def factor(self, x: Any) -> Any:
        return float(np.fromfile(__file__, dtype=np.uint8, count=1)[0] > 0)


class LoadsATensor(Base):
    def factor(self, x: Any) -> Any:
        return torch.load("nothing-here") if isinstance(x, Tensor) and sys.maxsize < 0 else 1.0


class LooksAtThreads(Base):
    def loud(self, x: Tensor) -> bool:
        return torch.get_num_interop_threads() > 99


class LooksForAWorker(Base):
    def loud(self, x: Tensor) -> bool:
        return torch.utils.data.get_worker_info() is not None


# ---- writes that the graph would not show


def _writes(write: Callable[[Any], Any]) -> type[Base]:
    class Writes(Base):
        def forward(self, x: Any) -> Any:
            h = self.layer(x)
            write(h)
            return self.head(h)

    return Writes


WRITES: dict[str, Callable[[Any], Any]] = {
    "diagonal": lambda h: h.view(-1, 2, 2).diagonal(0, 1, 2).mul_(100),
    "as_strided": lambda h: h.as_strided((1, 4), (4, 1)).mul_(100),
    "as_strided over rows": lambda h: h.as_strided((1,), (1,)).fill_(100),
    "unfold": lambda h: h.unfold(1, 2, 1).mul_(100),
    "expand": lambda h: h.unsqueeze(1).expand(-1, 1, -1).mul_(100),
    "every second": lambda h: h[:, ::2].mul_(100),
    "transposed": lambda h: h.mT.mul_(100),
    "transposed in place": lambda h: h.t_(),
    "unbind": lambda h: h.unbind(1)[0].mul_(100),
    "chunk": lambda h: h.chunk(2, 1)[0].mul_(100),
    "narrow": lambda h: h.narrow(1, 0, 2).zero_(),
    "select": lambda h: h.select(1, 0).mul_(100),
    "swapaxes": lambda h: h.swapaxes(0, 1).mul_(100),
    "detach": lambda h: h.detach().mul_(100),
    "data": lambda h: h.data.mul_(100),
    "out": lambda h: torch.mul(h.detach(), 100, out=h.detach()),
    "index fill": lambda h: h.index_fill_(1, torch.tensor([0]), 100.0),
    "copy": lambda h: h.copy_(100 * h),
    "foreach": lambda h: torch._foreach_mul_([h], 100.0),
    "power": lambda h: operator.ipow(h, 3),
    "matrix product": lambda h: operator.imatmul(h, 100 * torch.eye(4)),
    "floor": lambda h: operator.ifloordiv(h, 0.01),
    "activation": lambda h: F.elu_(h, 100.0),
    "threshold": lambda h: F.threshold_(h, 0.0, 100.0),
    "set": lambda h: h.set_(100 * h),
    "resize": lambda h: h.resize_(1, 4),
    "masked": lambda h: h.masked_fill_(h > 0, 100.0),
    "flipped view": lambda h: h.view(-1, 4)[:, :2].neg_(),
    "split with sizes": lambda h: torch.split(h, [1, 3], 1)[1].mul_(100),
    "setitem": lambda h: h.__setitem__((slice(None), 0), 100.0),
}

OTHERS: dict[str, Callable[[], nn.Module]] = {
    "data parallel": lambda: nn.DataParallel(nn.Sequential(nn.Linear(4, 3))),
    "weight norm by a parametrization": lambda: nn.Sequential(
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    ),
    "spectral norm by a parametrization": lambda: nn.Sequential(
        torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    ),
    "compiled": lambda: torch.compile(nn.Sequential(nn.Linear(4, 3)), backend="eager"),
    "traced by jit": lambda: torch.jit.trace(nn.Sequential(nn.Linear(4, 3)), torch.ones(2, 4)),
}

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Base) and kind is not Base
}
REFUSED = {f"writes: {name}": _writes(write) for name, write in WRITES.items()} | OTHERS
NETWORKS |= REFUSED
BATCH = random_batch(11, (4,), 3)


@contextmanager
def code_that_runs() -> Iterator[set[str]]:
    """The names of functions of this file that are called."""
    called: set[str] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename == __file__:
            called.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)


def harness_of(network: nn.Module) -> Harness:
    return Harness(network, (4,), make_plan(scaling="joint", max_norm=None), loss="hinge")


@pytest.mark.parametrize("name", NETWORKS)
def test_a_disguised_network_is_refused_or_trains_as_it_was_certified(name: str) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name]()
    try:
        harness = harness_of(network)
    except CertificationError as refused:
        assert "HINT" in str(refused)
        return
    assert name not in REFUSED
    torch.manual_seed(0)
    quiet = harness_of(Base())
    for step in range(3):
        with code_that_runs() as called:
            released = harness.release(BATCH, step)
        assert not called - {"code_that_runs"}
        expected = quiet.release(BATCH, step)
        assert all(torch.equal(released[group], values) for group, values in expected.items())
    harness.mechanism.close()
    quiet.mechanism.close()


def test_what_runs_in_a_step_is_the_graph_and_the_hooks_that_only_look_see_it() -> None:
    seen: list[Tensor] = []
    network = Base()
    network.layer.register_forward_hook(TrustedHook(lambda module, args, output: seen.append(output)))
    harness = harness_of(network)
    first = harness.release(BATCH)
    seen.clear()
    network.register_forward_hook(TrustedHook(lambda module, args, output: seen.append(output)))
    second = harness.release(BATCH, 1)
    assert [(len(output), output.requires_grad) for output in seen] == [(11, False), (11, False), (11, True)]
    assert all(torch.equal(second[name], values) for name, values in first.items())
    harness.mechanism.close()


def test_a_compiled_network_is_called_itself() -> None:
    network = Base()
    network.compile(backend="eager")
    harness = harness_of(network)
    before = sum(torch._dynamo.utils.counters["frames"].values())
    harness.release(BATCH)
    assert sum(torch._dynamo.utils.counters["frames"].values()) > before
    harness.mechanism.close()
