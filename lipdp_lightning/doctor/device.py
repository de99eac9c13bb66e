"""Checks what a private step relies on, on one device: noise, digest, certificate, repeated bits, waits, time."""

from __future__ import annotations

import hashlib
import itertools
import statistics
import warnings
from typing import Any

import torch
from torch import Tensor

from ..kernels.multilinear import key_table, multilinear_hash
from ..kernels.normals import normals
from ..kernels.numeric_environment import repeats_bits, require_repeated_bits
from ..layers.contribution import weighted_gradients
from ..mechanism.allocation import sum_margin
from ..mechanism.noise import StepNoise, Sum
from ..mechanism.reductions import release_
from .finding import Finding
from .trial import ROWS, Trial

KEY = bytes(range(32))
NOISE = "bd5661a0e37b6109d7fa8495f710c813223c4b23dd0336e625985e29060db6af"
"""SHA-256 of the normals 8 to 1032 of stream 1 under KEY, as little-endian float64."""

HASH = (5929086847280231622, 8774554148429374739, -7741688841440676705, 7209888987692350007)
"""The keyed hash of the float32 numbers 0 to 39,999 under KEY."""

_STEPS = 5
_LONG = 300  # number of equal examples in a long sum
_LOOSEST = 1.05  # the largest accepted ratio of a certified norm to the true one
_ROUNDING = 1e-5


def noise(device: torch.device) -> Finding:
    """Compares the bits of noise with those on record, and the release on a device with the CPU's."""
    drawn = hashlib.sha256(normals(KEY, 1, 8, 1024).numpy().astype("<f8").tobytes()).hexdigest()
    if drawn != NOISE:
        return Finding(
            "normals on the CPU have other bits than those on record",
            "do not train here: remove the compiled loops beside lipdp_lightning/kernels, and report this page.",
        )
    if device.type == "cpu":
        return Finding("1024 normals have the bits on record")
    for dtype in (torch.float32, torch.float64):
        released = []
        for place in (torch.device("cpu"), device):
            values = torch.linspace(-3, 3, 40_003, dtype=dtype).to(place)
            release_([Sum(values, 1.7, 1 / 3, 409.6)], StepNoise(KEY))
            released.append(values.cpu())
        different = int((released[0] != released[1]).sum())
        if different:
            return Finding(
                f"{different} of {len(released[0])} {dtype} releases differ from the CPU's",
                "do not train here: report this page, with the versions of Triton and of the driver.",
            )
    return Finding("1024 normals have the bits on record, and 80,006 releases those of the CPU")


def digest(device: torch.device) -> Finding:
    """Compares the keyed hash of weights with that on record."""
    values = torch.arange(40_000.0).to(device)
    found = tuple(multilinear_hash([values], key_table(KEY).to(device)).tolist())
    if found != HASH:
        return Finding("the hash has other bits than those on record", "do not train here: report this page.")
    return Finding("the hash of 40,000 numbers has the bits on record")


def certificate(device: torch.device) -> Finding:
    """Compares a certificate with singular values in float64 on the host, and with the certificate on a CPU."""
    own = Trial(device)
    weight = own.network.get_parameter("4.weight").detach().cpu().double()
    true = float(torch.linalg.svdvals(weight)[0])
    ratio = own.mechanism.boundary()["4"][0] / true
    numbers = {"certified_over_true_norm": ratio}
    if not 1 - 1e-9 <= ratio <= _LOOSEST:
        return Finding(
            f"a certified norm is {ratio:.6f} of the true one", "do not train here: report this page.", numbers
        )
    here, host = own.mechanism.sensitivities(), Trial(torch.device("cpu")).mechanism.sensitivities()
    worst = max(abs(here[name] / host[name] - 1) for name in host)
    own.mechanism.close()
    if worst > _ROUNDING:
        return Finding(f"sensitivities differ from the CPU's by {worst:.1e}", "do not train here: report this page.")
    return Finding(f"a norm is certified at {ratio:.4f} of the true one; sensitivities are the CPU's", "", numbers)


def sums(device: torch.device) -> Finding:
    """Compares how far one example moves a long sum of equal ones with the margin that noise pays for."""
    numbers = {}
    for name, tensor_cores in itertools.product(_LAYERS, (False, True)):
        kind = f"{name}, tensor cores" if tensor_cores else name
        moved = _moved(*_LAYERS[name], tensor_cores, device)
        numbers[kind] = moved - 1
        if moved > sum_margin(_LONG, tensor_cores):
            return Finding(
                f"{kind}: an example moves a sum by {moved:.5f} of its bound, and the margin is "
                f"{sum_margin(_LONG, tensor_cores):.5f}",
                "do not train here: report this page, with the versions of cuBLAS and cuDNN.", numbers,
            )  # fmt: skip
    return Finding(f"sums of {_LONG} equal examples move within their margin", "", numbers)


_LAYERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], Any]] = {
    "linear": ((1024, 8), (1024, 4), (4, 8), None),
    "convolution": ((8, 32, 32), (8, 32, 32), (8, 8, 3, 3), ([1, 1], [1, 1], [1, 1], 1)),
}
"""The shapes of an example, of its cotangent and of the weight, and the options of a convolution."""


def _moved(
    of_row: tuple[int, ...], of_cotangent: tuple[int, ...], of_weight: tuple[int, ...], options: Any,
    tensor_cores: bool, device: torch.device,
) -> float:  # fmt: skip
    """Returns how far one more of many equal examples moves the weight's stored gradient, over its own norm."""
    row = torch.full(of_row, 1.2969970703125).to(device)  # its roundings add up more than those of most numbers
    cotangent = torch.ones(of_cotangent).to(device)

    def total(rows: int, kind: torch.dtype = torch.float32) -> Tensor:
        x, d = (part.to(kind).expand(rows, *part.shape) for part in (row, cotangent))
        weight = torch.zeros(of_weight, dtype=kind).to(device)
        found, _ = weighted_gradients(x, d, weight, None, (True, False), options, tensor_cores)
        assert found is not None
        return found.cpu().double()

    return float((total(_LONG) - total(_LONG - 1)).norm() / total(1, torch.float64).norm())


def repeated_step(device: torch.device) -> Finding:
    """Takes the same two steps twice and compares their bits; a GPU is asked to repeat them."""
    if device.type == "cuda":
        require_repeated_bits()
    weights = []
    for _ in range(2):
        trial = Trial(device)
        trial.step(0)
        trial.step(1)
        trial.mechanism.close()
        weights.append(trial.weights())
    if not torch.equal(weights[0].view(torch.int32), weights[1].view(torch.int32)):
        return Finding(
            "the same two steps end with other bits",
            "every crash costs the steps that were reserved, up to 50: see privacy.deterministic in docs/gpu.md.",
        )
    if not bool(weights[0].isfinite().all()) or not repeats_bits(device):
        return Finding("the steps end with numbers that are not finite", "report this page.")
    return Finding("the same two steps end with the same bits")


def waits(device: torch.device) -> Finding:
    """Counts how often the host waits for the device in a step."""
    if device.type != "cuda":
        return Finding("not countable on a CPU")
    trial = Trial(device)
    trial.step(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trial.step(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    trial.mechanism.close()
    count = sum("synchroniz" in str(warning.message) for warning in caught)
    return Finding(f"{count} waits in a step of two layers", "", {"waits": count})


def times(device: torch.device) -> Finding:
    """Measures the parts of a step."""
    trial, parts = Trial(device), []
    for number in range(1 + _STEPS):
        trial.step(number)
        parts.append(dict(trial.milliseconds))
    trial.mechanism.close()
    medians = {part: round(statistics.median(taken[part] for taken in parts[1:]), 3) for part in parts[0]}
    text = ", ".join(f"{part} {value:.2f}" for part, value in medians.items())
    return Finding(f"milliseconds of a step on {ROWS} made-up images: {text}", "", medians)
