"""Counts what a step holds and computes, without timing it: memory, floating-point operations, launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ..bounds.certifier import Certifier
from ..bounds.losses import CrossEntropy
from ..kernels.normals import PIECE
from ..layers import make_private
from ..norms.follow import Follower
from .networks import network_named

FLOAT32, FLOAT64 = 4, 8
NOISE_AT_ONCE = FLOAT64 * 3 * PIECE
"""Bytes of the words, the normals and the sum of one piece of a release."""


@dataclass(frozen=True)
class Counts:
    """Counts of one network.

    They are its parameters, the bytes per example that are kept for the backward pass, the operations per example of
    both passes, and the bytes that bounds of norms refer to between steps.
    """

    model: str
    parameters: int
    saved: int
    operations: int
    references: int


def count(name: str) -> Counts:
    """Counts by one forward and backward pass of two examples, halved."""
    network = network_named(name)
    model = network.build()
    x = torch.rand(2, *network.shape)
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = CrossEntropy().per_example(model(x), torch.zeros(2, dtype=torch.int64)).sum()
        loss.backward()
    parameters = sum(p.numel() for p in model.parameters())
    matrices = [p for p in model.parameters() if p.ndim > 1]
    references = sum(FLOAT32 * m.numel() for m in matrices)
    return Counts(name, parameters, sum(kept.values()) // 2, counter.get_total_flops() // 2, references)


def memory_lines(counts: Sequence[Counts], batch_sizes: Sequence[int]) -> tuple[list[str], list[list[str]]]:
    """Returns a table of MB above the weights, at the end of the passes or at the release.

    This library keeps what bounds of norms refer to between steps. At the release, it adds the words of pieces of noise
    on one CPU, else a float64 buffer for the noise of all parameters.
    """
    headers = ["model", "parameters", "kept per example", "batch", "without privacy", "ours, one CPU process",
               "ours, GPU or several processes", "gradients per example"]  # fmt: skip
    lines = []
    for c in counts:
        for batch in batch_sizes:
            plain = c.saved * batch + FLOAT32 * c.parameters
            passes, release = plain + c.references, c.references + FLOAT32 * c.parameters
            ours = max(passes, release + min(NOISE_AT_ONCE, FLOAT64 * c.parameters))
            whole = max(passes, release + FLOAT64 * c.parameters)
            each = plain + FLOAT32 * c.parameters * batch
            megabytes = [f"{value / 1e6:.{1 if value < 1e7 else 0}f} MB" for value in (plain, ours, whole, each)]
            lines.append([c.model, f"{c.parameters:,}", f"{c.saved / 1e3:.0f} kB", str(batch), *megabytes])
    return headers, lines


class _Operations(TorchDispatchMode):
    """Counts what is sent to the device, how often the host waits for a number, and floating-point operations."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.launches = self.waits = self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._local_scalar_dense.default:
            self.waits += 1
        elif not function.is_view:
            self.launches += 1
        count = flop_registry.get(function.overloadpacket)
        if count is not None:
            self.operations += count(*args, **(kwargs or {}), out_val=result)
        return result


class _CountedCertifier(Certifier):
    """A Certifier of a network that stays what it is, which does not refuse the mode that counts its operations."""

    def follow(self) -> None:
        """Keeps the network that was traced in set-up."""


@dataclass(frozen=True)
class CertificateCounts:
    """Counts per step of projection and certificate together, including exact norms that fall due."""

    launches: float
    waits: float
    operations: float


def count_certificate(name: str, steps: int, update_size: float, max_norm: float = 1.0) -> CertificateCounts:
    """Counts over steps with random updates, after the exact norms of the set-up."""
    from .certificate_cost import Clipping, RandomUpdates

    torch.manual_seed(0)
    network = network_named(name)
    model: nn.Module = make_private(network.build())
    norms = Follower()
    certifier = _CountedCertifier(model, network.shape, 1.0, CrossEntropy(), norms=norms)
    certifier.certify()
    clip = Clipping(model, norms, max_norm)
    clip()
    update, total = RandomUpdates(model, update_size), _Operations()
    for _ in range(steps):
        update()
        with total:
            clip()
            certifier.certify()
    return CertificateCounts(total.launches / steps, total.waits / steps, total.operations / steps)
