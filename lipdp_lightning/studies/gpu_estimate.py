"""Estimates private steps on GPUs on paper, from counts and from assumed rates. Nothing here was run on a GPU.

    python -m lipdp_lightning.studies.gpu_estimate [--model wrn-16-4 --batch-size 4096 --views 16 --gpus 8]

Parameters, operations, bytes that operations read and write, launches and waits are counted. Everything else is an
assumption, and printed with the result. The device and the host work side by side: a step takes the longer of what the
parts take on the device and of what the launches take on the host, and the waits on top. On the device, a part takes
the longer of its operations and its bytes.
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
from ..bench.step_counts import FLOAT32, FLOAT64, Counts, count, count_certificate
from ..layers.contribution import TERMS_OF_A_PIECE

STEPS_COUNTED = 20
UPDATE_SIZE = 0.002
PRECISIONS = ("bf16", "float32")


@dataclass(frozen=True)
class Launches:
    """Counts the launches of one step, as tests/gpu/test_counts.py does, without those of the optimizer.

    Attributes:
        passes: The launches of the forward and backward pass.
        rest: The launches of certificate, release and projection.
        waits: How often the host waits for the device in a step.
        plain: The launches of the forward and backward pass without privacy.
    """

    passes: int
    rest: int
    waits: int
    plain: int


ON_A_GPU = {
    "scattering-head": Launches(19, 20, 2, 7), "convnet-1.6m": Launches(41, 32, 2, 26),
    "wrn-16-4": Launches(159, 71, 2, 131),
}  # fmt: skip
SUM_PROGRAMS, SUM_TILE = 864, 64  # of the kernel for weight gradients, kernels/gpu.py


@dataclass(frozen=True)
class Assumed:
    """Holds the assumed rates, per GPU unless said otherwise: bytes and operations per second, and seconds."""

    bf16: float = 125e12
    own_bf16: float = 75e12
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
            ("the same by this library's kernel for weight gradients", f"{self.own_bf16 / 1e12:g} TFLOP/s"),
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
    """Holds counts of the forward and backward pass of a network in float32.

    Attributes:
        bytes: The bytes that all operations read and write for one row.
        launches: The number of operations, which does not depend on the number of rows.
        layers: For each layer, the numbers of weights, output positions, entries of its input, and outputs.
    """

    bytes: int
    launches: int
    layers: tuple[tuple[int, int, int, int], ...]


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
                    (own.weight.numel(), out[0].numel() // own.weight.shape[0], given[0][0].numel(), len(own.weight))
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
    """Holds the seconds of the parts of one private step on ``gpus`` GPUs, and of the same step without privacy.

    Attributes:
        gpus: The number of GPUs.
        passes: The forward and backward pass without the gradients of the weights.
        gradients: The gradients of the weights.
        sums: The partial sums of these gradients in float64.
        norms: The norms of examples, which are computed from the input of every layer.
        weights: The digests and norms of weights.
        release: The noise, and what follows until the optimizer steps.
        sum_over_gpus: The sum over processes.
        launches: The launches on the host, which run beside the device.
        waits: The waits of the host.
        plain: The whole step without privacy.
    """

    gpus: int
    passes: float
    gradients: float
    sums: float
    norms: float
    weights: float
    release: float
    sum_over_gpus: float
    launches: float
    waits: float
    plain: float

    @property
    def parts(self) -> tuple[float, ...]:
        """The seconds of what runs on the device, one part after the other."""
        sums = self.passes, self.gradients, self.sums, self.norms
        return *sums, self.weights, self.release, self.sum_over_gpus

    @property
    def total(self) -> float:
        return max(sum(self.parts), self.launches) + self.waits


def estimate(
    counts: Counts, passes: Passes, launches: Launches, rows: int, gpus: int, precision: str, assumed: Assumed,
    operations_on_weights: float = 0.0,
) -> Step:  # fmt: skip
    """Returns the estimate of a step on so many rows, over all GPUs, each view of an example being a row."""
    own, bf16 = rows / gpus, precision == "bf16"
    width, fast, slow = (0.5, assumed.bf16, assumed.own_bf16) if bf16 else (1.0, assumed.float32, assumed.float32)
    operations, traffic = counts.operations * own, passes.bytes * own * width / assumed.memory
    size = FLOAT32 * counts.parameters
    pieces = [0 if bf16 else math.ceil(own * p / TERMS_OF_A_PIECE) for _, p, _, _ in passes.layers]
    sums = sum(n * (FLOAT32 + 2 * FLOAT64) * (k > 1) * k for (n, *_), k in zip(passes.layers, pieces, strict=True))
    if bf16:  # partial sums are written and read
        sums = sum(2 * FLOAT64 * n * _parts(n, outputs, own * p) for n, p, _, outputs in passes.layers)
    drawn = max(counts.parameters / assumed.normals, 2 * size / assumed.memory)
    plain_sum = _ring(size, gpus, assumed)
    computed = operations / fast
    return Step(
        gpus,
        passes=max(computed, traffic) * 2 / 3,
        gradients=max(operations / slow, traffic) / 3,
        sums=sums / assumed.memory,
        norms=own * sum(e for _, _, e, _ in passes.layers) * FLOAT32 * width / assumed.memory,
        weights=operations_on_weights / assumed.float32 + 3 * size / assumed.memory,
        release=drawn if gpus == 1 else drawn + 2 * 2 * size / assumed.memory,
        sum_over_gpus=2 * plain_sum,
        launches=(launches.passes + launches.rest + sum(2 * k for k in pieces if k > 1)) * assumed.launch,
        waits=launches.waits * assumed.wait,
        plain=max(max(computed, traffic) + plain_sum, launches.plain * assumed.launch),
    )


def _parts(weights: int, outputs: int, terms: float) -> int:
    """Returns the number of programs that share the sum of one tile of a weight's gradient."""
    tiles = math.ceil(outputs / SUM_TILE) * math.ceil(weights / outputs / SUM_TILE)
    return max(1, min(math.ceil(terms / (1 << 13)), SUM_PROGRAMS // tiles))


def _ring(size: float, gpus: int, assumed: Assumed) -> float:
    """Returns the time in which a buffer is summed over GPUs by rings within and between nodes."""
    nodes, local = -(-gpus // assumed.gpus_per_node), min(gpus, assumed.gpus_per_node)
    within, between = (local - 1) / local / assumed.link, (nodes - 1) / nodes / assumed.network
    return 2 * size * (within + between)


HEADERS = (
    "GPUs", "precision", "passes ms", "weight gradients ms", "their sums ms", "norms ms", "weights ms", "release ms",
    "sum over GPUs ms", "launches on the host ms", "waits ms", "step ms", "without privacy ms", "ratio",
)  # fmt: skip


def lines(steps: Sequence[tuple[str, Step]]) -> list[list[str]]:
    return [
        [
            str(s.gpus), precision,
            *(f"{1e3 * part:.2f}" for part in (*s.parts, s.launches, s.waits)),
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
    launches = Launches(passes.launches, int(certificate.launches), int(certificate.waits), passes.launches)
    if model in ON_A_GPU:
        where, launches = "on a pretended GPU", ON_A_GPU[model]
    steps = [
        (kind, estimate(counts, passes, launches, batch_size * views, number, kind, assumed, certificate.operations))
        for number in gpus
        for kind in PRECISIONS
    ]
    facts = [
        ("parameters, counted", f"{counts.parameters:,}"),
        ("operations per row, forward and backward, counted", f"{counts.operations / 1e9:.2f} GFLOP"),
        ("bytes per row that these operations read and write in float32, counted", f"{passes.bytes / 1e6:.1f} MB"),
        (
            f"launches and waits of a step but for its optimizer, counted {where}",
            f"passes {launches.passes}, certificate, release and projection {launches.rest}, waits {launches.waits}; "
            f"{launches.plain} launches without privacy",
        ),
        ("operations on weights, counted on a CPU", f"{certificate.operations / 1e9:.2f} GFLOP"),
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
