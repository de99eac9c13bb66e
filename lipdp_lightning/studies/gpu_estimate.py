"""Estimates private steps on GPUs on paper, from counts and from assumed rates. Nothing here was run on a GPU.

    python -m lipdp_lightning.studies.gpu_estimate [--model wrn-40-4] [--batch-size 4096]

Parameters, operations, bytes, launches and waits of the certificate are counted. float64 normals per second on one core
of this machine are measured. Everything else is an assumption, and printed with the result.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..bench.step_counts import FLOAT64, CertificateCounts, Counts, count, count_certificate
from ..privacy.streams import CounterStream

STEPS_COUNTED = 20
UPDATE_SIZE = 0.002


@dataclass(frozen=True)
class Assumed:
    """Assumed rates per GPU unless said otherwise; bytes and operations per second, seconds."""

    operations: float = 20e12
    memory: float = 1.5e12
    link: float = 200e9  # between GPUs of one node
    network: float = 25e9  # between nodes, per node
    host: float = 20e9  # from host to GPU
    gpus_per_node: int = 8
    noise_threads: int = 8  # per GPU
    launch: float = 8e-6
    wait: float = 3e-5

    def lines(self) -> list[tuple[str, str]]:
        return [
            ("operations sustained in forward and backward, per GPU", f"{self.operations / 1e12:g} TFLOP/s"),
            ("memory bandwidth, per GPU", f"{self.memory / 1e12:g} TB/s"),
            ("between GPUs of a node, per GPU", f"{self.link / 1e9:g} GB/s"),
            ("between nodes, per node", f"{self.network / 1e9:g} GB/s"),
            ("from host to GPU", f"{self.host / 1e9:g} GB/s"),
            ("GPUs per node", f"{self.gpus_per_node}"),
            ("processor threads that draw noise, per GPU", f"{self.noise_threads}"),
            ("launch of an operation", f"{1e6 * self.launch:g} us"),
            ("wait of the host for a number", f"{1e6 * self.wait:g} us"),
        ]


@dataclass(frozen=True)
class Step:
    """Seconds of one step on ``gpus`` GPUs. Noise is drawn beside ``passes``, and costs what exceeds them."""

    gpus: int
    passes: float
    noise: float
    copy: float
    certificate: float
    release: float
    sum_over_gpus: float
    sent: float  # bytes per GPU

    @property
    def total(self) -> float:
        return max(self.passes, self.noise) + self.copy + self.certificate + self.release + self.sum_over_gpus

    @property
    def heaviest(self) -> str:
        """The part by which privacy adds most; the sum counts for what float64 adds to the float32 of plain
        training.
        """
        added = {
            "noise": max(0.0, self.noise - self.passes), "copy of the noise": self.copy,
            "certificate": self.certificate, "release": self.release, "sum over GPUs": self.sum_over_gpus / 2,
        }  # fmt: skip
        return max(added, key=lambda name: added[name])

    @property
    def plain(self) -> float:
        """The time of the same passes and a sum of float32."""
        return self.passes + self.sum_over_gpus / 2


def estimate(
    counts: Counts, certificate: CertificateCounts, per_normal: float, batch_size: int, gpus: int, assumed: Assumed
) -> Step:
    """Returns the estimate; ``per_normal`` is the time in seconds that one core takes for a float64 normal."""
    buffer = FLOAT64 * counts.parameters
    nodes = -(-gpus // assumed.gpus_per_node)
    local = min(gpus, assumed.gpus_per_node)
    sent = 2 * buffer * (gpus - 1) / gpus  # by a ring
    within, between = (
        2 * buffer * (local - 1) / local / assumed.link,
        2 * buffer * (nodes - 1) / nodes / assumed.network,
    )
    return Step(
        gpus,
        passes=counts.operations * batch_size / gpus / assumed.operations,
        noise=counts.parameters * per_normal / assumed.noise_threads,
        copy=buffer / assumed.host,
        certificate=max(certificate.launches * assumed.launch, certificate.operations / assumed.operations)
        + certificate.waits * assumed.wait,
        release=4 * buffer / assumed.memory,  # add, divide, write back
        sum_over_gpus=within + between,
        sent=sent,
    )


def seconds_per_normal(total: int = 2**21, repeats: int = 5) -> float:
    """Returns the time on one core of this machine, the fastest of several draws."""
    best = float("inf")
    for key in range(repeats):
        start = time.perf_counter()
        CounterStream(key.to_bytes(32, "big")).normal(total)
        best = min(best, time.perf_counter() - start)
    return best / total


HEADERS = (
    "GPUs", "passes ms", "noise (beside) ms", "copy of it ms", "certificate ms", "release ms", "sum over GPUs ms",
    "sent per GPU MB", "step ms", "over plain", "privacy adds most by",
)  # fmt: skip


def lines(steps: Sequence[Step]) -> list[list[str]]:
    return [
        [
            str(s.gpus),
            *(f"{1e3 * v:.2f}" for v in (s.passes, s.noise, s.copy, s.certificate, s.release, s.sum_over_gpus)),
            f"{s.sent / 1e6:.0f}", f"{1e3 * s.total:.1f}", f"{s.total / s.plain:.2f}", s.heaviest,
        ]
        for s in steps
    ]  # fmt: skip


def markdown(model: str, batch_size: int, gpus: Sequence[int], assumed: Assumed | None = None) -> str:
    """Returns the estimate with everything that it rests on."""
    from ..bench.comparison_files import markdown_table

    assumed = assumed or Assumed()
    counts, certificate = count(model), count_certificate(model, STEPS_COUNTED, UPDATE_SIZE)
    per_normal = seconds_per_normal()
    steps = [estimate(counts, certificate, per_normal, batch_size, number, assumed) for number in gpus]
    facts = [
        ("parameters, counted", f"{counts.parameters:,}"),
        ("operations per example, forward and backward, counted", f"{counts.operations / 1e9:.2f} GFLOP"),
        (
            f"certificate and projection per step, counted over {STEPS_COUNTED} updates of {100 * UPDATE_SIZE:g} %",
            f"{certificate.launches:.0f} launches, {certificate.waits:.0f} waits, "
            f"{certificate.operations / 1e9:.2f} GFLOP",
        ),
        ("float64 normals on one core of this machine, measured", f"{1e9 * per_normal:.1f} ns each"),
        *((f"{name}, assumed", value) for name, value in assumed.lines()),
    ]
    return (
        f"ESTIMATE, not measured: {model}, {batch_size} examples expected per step over all GPUs.\n\n"
        + markdown_table(HEADERS, lines(steps)) + "\nIt rests on:\n\n" + markdown_table(("", ""), facts)
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wrn-40-4", help="network")
    parser.add_argument("--batch-size", type=int, default=4096, help="expected batch size")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64], help="numbers of GPUs")
    options = parser.parse_args()
    sys.stdout.write(markdown(options.model, options.batch_size, options.gpus))


if __name__ == "__main__":
    main()
