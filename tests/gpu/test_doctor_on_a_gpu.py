"""The doctor's lines about a device, on the pretended GPU, and what they are to find on a real one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pretend
import pytest
import torch
from pretend import DEVICE, pretended_gpu

from lipdp_lightning.doctor import device as on_device
from lipdp_lightning.doctor.finding import Finding, examine
from lipdp_lightning.mechanism import reductions
from lipdp_lightning.mechanism.step import Mechanism


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


LINES = ("noise", "digest", "certificate", "sums", "repeated_step", "times")


def found(line: str, monkeypatch: pytest.MonkeyPatch) -> Finding:
    with pretended_gpu(monkeypatch):
        return examine(lambda: getattr(on_device, line)(DEVICE))


@pytest.mark.parametrize("line", LINES)
def test_a_sound_gpu_passes(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = found(line, monkeypatch)
    assert finding.passed, finding


def fused(patch: pytest.MonkeyPatch) -> None:
    """One rounding less: the noise and the sum are added in the last bit's favour."""
    true = pretend._release_

    def release_(values: Any, key: bytes, deviation: float, **given: Any) -> None:
        true(values, key, deviation * (1 + 2**-52), **given | {"shift": 0.0})

    patch.setattr(pretend.KERNELS, "release_", release_)


def narrowed(patch: pytest.MonkeyPatch) -> None:
    true = pretend.normals
    patch.setattr(pretend, "normals", lambda *given: true(*given).float().double())


def lost_row(patch: pytest.MonkeyPatch) -> None:
    true = pretend._row_sums
    patch.setattr(pretend.KERNELS, "row_sums", lambda rows, key: true(rows[:1].repeat(len(rows), 1), key))


def other_certificate(patch: pytest.MonkeyPatch) -> None:
    true = Mechanism.sensitivities
    off = lambda self: {n: d * (1 + 1e-3 * (self._device == DEVICE)) for n, d in true(self).items()}  # noqa: E731
    patch.setattr(Mechanism, "sensitivities", off)


def one_long_sum(patch: pytest.MonkeyPatch) -> None:
    """Products that add up all of their terms in float32."""
    patch.setattr("lipdp_lightning.layers.contribution.TERMS_OF_A_PIECE", 1 << 40)


def atomic_sums(patch: pytest.MonkeyPatch) -> None:
    """Bits that change from one release to the next."""
    count = iter(range(10_000))
    release = reductions.release_

    def released(sums: Any, *given: Any, **more: Any) -> None:
        factor = 1 + 2e-7 * next(count)
        release([replace(one, divisor=one.divisor * factor) for one in sums], *given, **more)

    patch.setattr("lipdp_lightning.mechanism.step.release_", released)


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "a product is fused": ("noise", fused),
    "noise is drawn in float32": ("noise", narrowed),
    "a row of the hash is lost": ("digest", lost_row),
    "another certificate": ("certificate", other_certificate),
    "sums that round too much": ("sums", one_long_sum),
    "bits that do not repeat": ("repeated_step", atomic_sums),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_device_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line, plant = FAULTS[fault]
    plant(monkeypatch)
    finding = found(line, monkeypatch)
    assert not finding.passed and finding.hint


def test_waits_are_counted_by_the_warnings_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    true = Mechanism.project_

    def project_(self: Mechanism) -> None:
        if modes == ["warn"]:
            import warnings

            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        true(self)

    monkeypatch.setattr(Mechanism, "project_", project_)
    finding = found("waits", monkeypatch)
    assert finding.numbers == {"waits": 1} and modes == ["warn", "default"]
