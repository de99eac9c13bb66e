"""Estimates private steps on GPUs on paper, from counts and from assumed rates. Nothing here was run on a GPU.

    python -m lipdp_lightning.studies.gpu_estimate [--model wrn-16-4 --batch-size 4096 --views 16 --gpus 8]

Parameters, operations, bytes that operations read and write, launches, and waits of the certificate are counted.
Everything else is an assumption, and printed with the result. The time of a part is the longest of what its operations,
its bytes and its launches take.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..bench.networks import network_named
from ..bench.step_counts import FLOAT32, FLOAT64, CertificateCounts, Counts, count, count_certificate
from ..layers.contribution import TERMS_OF_A_PIECE

STEPS_COUNTED = 20
UPDATE_SIZE = 0.002
PRECISIONS = ("bf16", "float32")
ON_A_GPU = {"scattering-head": (20, 2), "convnet-1.6m": (32, 2), "wrn-16-4": (71, 2)}
"""Launches and waits of certificate, release and projection in a steady step, as tests/gpu/test_counts.py has them."""


@dataclass(frozen=True)
class Assumed:
    """Assumed rates per GPU unless said otherwise; bytes and operations per second, seconds."""

    bf16: float = 125e12
    tf32: float = 62e12
    float32: float = 14e12
    memory: float = 1.5e12
    normals: float = 55e9
    link: float = 200e9  # between GPUs of one node
    network: float = 25e9  # between nodes, per node
    gpus_per_node: int = 8
    launch: float = 8e-6
    wait: float = 3e-5

    def lines(self) -> list[tuple[str, str]]:
        return [
            ("operations sustained in bfloat16, on tensor cores, per GPU", f"{self.bf16 / 1e12:g} TFLOP/s"),
            ("the same in TF32", f"{self.tf32 / 1e12:g} TFLOP/s"),
            ("the same in IEEE float32", f"{self.float32 / 1e12:g} TFLOP/s"),
            ("memory bandwidth, per GPU", f"{self.memory / 1e12:g} TB/s"),
            ("float64 normals, per GPU and second", f"{self.normals / 1e9:g} billion"),
            ("between GPUs of a node, per GPU", f"{self.link / 1e9:g} GB/s"),
            ("between nodes, per node", f"{self.network / 1e9:g} GB/s"),
            ("GPUs per node", f"{self.gpus_per_node}"),
            ("launch of an operation", f"{1e6 * self.launch:g} us"),
            ("wait of the host for a number", f"{1e6 * self.wait:g} us"),
        ]


@dataclass(frozen=True)
class Passes:
    """Counts of the forward and backward pass of a network in float32.

    Attributes:
        bytes: What all operations read and write for one row.
        launches: The operations, whatever the number of rows.
        layers: Of each layer, the number of weights, of output positions, and of entries of its input and output.
    """

    bytes: int
    launches: int
    layers: tuple[tuple[int, int, int], ...]


class _Traffic(TorchDispatchMode):
    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.bytes = self.launches = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.launches += 1
            self.bytes += sum(t.nbytes for t in tree_leaves((args, result)) if isinstance(t, Tensor))
        return result


def count_passes(name: str, rows: int = 8) -> Passes:
    """Counts by passes of ``rows`` rows and of twice as many, whose difference has no bytes of weights in it."""
    network, found, layers = network_named(name), [], []
    model = network.build()
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            layer.register_forward_hook(
                lambda own, given, out: layers.append(
                    (own.weight.numel(), out[0].numel() // own.weight.shape[0], given[0][0].numel() + out[0].numel())
                )
            )
    for number in (rows, 2 * rows):
        layers.clear()
        x, y = torch.rand(number, *network.shape), torch.zeros(number, dtype=torch.int64)
        with _Traffic() as traffic:
            nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
        found.append(traffic)
    return Passes((found[1].bytes - found[0].bytes) // rows, found[0].launches, tuple(layers))


@dataclass(frozen=True)
class Step:
    """Seconds of the parts of one private step on ``gpus`` GPUs, and of the same step without privacy."""

    gpus: int
    passes: float
    norms: float  # of examples, from every layer's input
    pieces: float  # sums over the batch, added in float64
    widened: float  # factors of these sums, from bfloat16 to the float32 that TF32 products take
    certificate: float
    release: float
    sum_over_gpus: float
    plain: float

    @property
    def parts(self) -> tuple[float, ...]:
        own = self.passes, self.norms, self.pieces, self.widened
        return *own, self.certificate, self.release, self.sum_over_gpus

    @property
    def total(self) -> float:
        return sum(self.parts)


def estimate(
    counts: Counts, passes: Passes, certificate: CertificateCounts, rows: int, gpus: int, precision: str,
    assumed: Assumed,
) -> Step:  # fmt: skip
    """Returns the estimate of a step on so many rows, over all GPUs, each view of an example being a row."""
    own = rows / gpus
    width = 0.5 if precision == "bf16" else 1.0
    fast = assumed.bf16 if precision == "bf16" else assumed.float32
    slow = assumed.tf32 if precision == "bf16" else assumed.float32
    operations, traffic = counts.operations * own, passes.bytes * own * width / assumed.memory
    weights = FLOAT32 * counts.parameters
    pieces = sum(n * max(0, math.ceil(own * p / TERMS_OF_A_PIECE) - 1) for n, p, _ in passes.layers)
    entries = sum(e for _, _, e in passes.layers)
    reads_of_weights = 3 * weights / assumed.memory  # two digests, and the copy that norms refer to
    drawn = max(counts.parameters / assumed.normals, 2 * weights / assumed.memory)
    plain_sum = _ring(weights, gpus, assumed)
    return Step(
        gpus,
        passes=max(operations * (2 / fast + 1 / slow) / 3, traffic, passes.launches * assumed.launch),
        norms=own * entries * FLOAT32 * width / assumed.memory,
        widened=own * entries * 8 / assumed.memory if precision == "bf16" else 0.0,
        pieces=pieces * (FLOAT32 + 2 * FLOAT64) / assumed.memory,
        certificate=max(certificate.launches * assumed.launch, certificate.operations / assumed.float32)
        + certificate.waits * assumed.wait + reads_of_weights,
        release=drawn if gpus == 1 else drawn + 2 * 2 * weights / assumed.memory,
        sum_over_gpus=2 * plain_sum,
        plain=max(operations / fast, traffic, passes.launches * assumed.launch) + plain_sum,
    )  # fmt: skip


def _ring(size: float, gpus: int, assumed: Assumed) -> float:
    """Returns the time in which a buffer is summed over GPUs by rings within and between nodes."""
    nodes, local = -(-gpus // assumed.gpus_per_node), min(gpus, assumed.gpus_per_node)
    within, between = (local - 1) / local / assumed.link, (nodes - 1) / nodes / assumed.network
    return 2 * size * (within + between)


HEADERS = (
    "GPUs", "precision", "passes ms", "norms ms", "pieces ms", "widening ms", "certificate and projection ms",
    "release ms", "sum over GPUs ms", "step ms", "without privacy ms", "ratio",
)  # fmt: skip


def lines(steps: Sequence[tuple[str, Step]]) -> list[list[str]]:
    return [
        [
            str(s.gpus), precision,
            *(f"{1e3 * part:.2f}" for part in s.parts),
            f"{1e3 * s.total:.1f}", f"{1e3 * s.plain:.1f}", f"{s.total / s.plain:.2f}",
        ]
        for precision, s in steps
    ]  # fmt: skip


def markdown(model: str, batch_size: int, gpus: Sequence[int], views: int = 1, assumed: Assumed | None = None) -> str:
    """Returns the estimate with everything that it rests on."""
    from ..bench.comparison_files import markdown_table

    assumed = assumed or Assumed()
    counts, passes = count(model), count_passes(model)
    certificate = count_certificate(model, STEPS_COUNTED, UPDATE_SIZE)
    where = "on a CPU, whose loops take fewer launches than a GPU would"
    if model in ON_A_GPU:
        where, (launches, waits) = "on a pretended GPU", ON_A_GPU[model]
        certificate = CertificateCounts(launches, waits, certificate.operations)
    steps = [
        (kind, estimate(counts, passes, certificate, batch_size * views, number, kind, assumed))
        for number in gpus
        for kind in PRECISIONS
    ]
    facts = [
        ("parameters, counted", f"{counts.parameters:,}"),
        ("operations per row, forward and backward, counted", f"{counts.operations / 1e9:.2f} GFLOP"),
        ("bytes per row that these operations read and write in float32, counted", f"{passes.bytes / 1e6:.1f} MB"),
        ("operations of both passes, counted", f"{passes.launches}"),
        (
            f"certificate, release and projection per step, counted {where}",
            f"{certificate.launches:.0f} launches, {certificate.waits:.0f} waits, "
            f"{certificate.operations / 1e9:.2f} GFLOP",
        ),
        *((f"{name}, assumed", value) for name, value in assumed.lines()),
    ]
    size = f"{batch_size} examples" + (f" x {views} views" if views > 1 else "")
    return (
        f"ESTIMATE, not measured: {model}, {size} expected per step over all GPUs, scaling joint.\n\n"
        + markdown_table(HEADERS, lines(steps)) + "\nIt rests on:\n\n" + markdown_table(("", ""), facts)
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wrn-16-4", help="network")
    parser.add_argument("--batch-size", type=int, default=4096, help="expected batch size")
    parser.add_argument("--views", type=int, default=1, help="views per example")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64], help="numbers of GPUs")
    options = parser.parse_args()
    sys.stdout.write(markdown(options.model, options.batch_size, options.gpus, options.views))


if __name__ == "__main__":
    main()
