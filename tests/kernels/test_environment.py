"""What decides the last bits of a sum: lipdp_lightning/kernels/numeric_environment.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from lipdp_lightning.kernels import numeric_environment as environment
from lipdp_lightning.kernels.numeric_environment import numeric_environment, repeats_bits, require_repeated_bits

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    properties = SimpleNamespace(multi_processor_count=108, total_memory=80)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(environment, "_driver", lambda: "driver 1")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    environment._of_the_gpu.cache_clear()
    yield
    environment._of_the_gpu.cache_clear()
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before


def other(name: str, value: object) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(torch.cuda, name, lambda device: value)


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "device": other("get_device_name", "B"),
    "capability": other("get_device_capability", (9, 0)),
    "multiprocessors": other("get_device_properties", SimpleNamespace(multi_processor_count=56, total_memory=80)),
    "memory": other("get_device_properties", SimpleNamespace(multi_processor_count=108, total_memory=40)),
    "driver": lambda patch: patch.setattr(environment, "_driver", lambda: "driver 2"),
    "CUDA": lambda patch: patch.setattr(torch.version, "cuda", "12.0"),
    "cuDNN": lambda patch: patch.setattr(torch.backends.cudnn, "version", lambda: 1),
    "Triton": lambda patch: patch.setattr(environment, "_version_of", lambda package: "0"),
    "benchmark": lambda patch: setattr(torch.backends.cudnn, "benchmark", True),
    "deterministic convolutions": lambda patch: setattr(torch.backends.cudnn, "deterministic", True),
    "deterministic algorithms": lambda patch: torch.use_deterministic_algorithms(True),
    "warnings only": lambda patch: torch.use_deterministic_algorithms(True, warn_only=True),
    "workspace": lambda patch: patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_everything_that_decides_how_a_gpu_rounds_is_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = numeric_environment(GPU)
    assert before == numeric_environment(GPU) != numeric_environment()
    CHANGES[what](monkeypatch)
    environment._of_the_gpu.cache_clear()
    assert numeric_environment(GPU) != before


def test_a_cpu_is_named_as_before_and_repeats_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    own = numeric_environment()
    torch.backends.cudnn.benchmark = True
    assert numeric_environment(torch.device("cpu")) == own and repeats_bits(torch.device("cpu"))
    assert own.startswith(torch.__version__.encode())


def test_a_gpu_repeats_its_bits_if_everything_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    assert not repeats_bits(GPU)
    require_repeated_bits()
    assert repeats_bits(GPU) and not repeats_bits(torch.device("mps"))
    for undo in (
        lambda: torch.use_deterministic_algorithms(False),
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0"),
        lambda: monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG"),
    ):
        undo()
        assert not repeats_bits(GPU)
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        require_repeated_bits()
        assert repeats_bits(GPU)


def test_a_workspace_that_does_not_repeat_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(ValueError, match="HINT: unset it"):
        require_repeated_bits()
