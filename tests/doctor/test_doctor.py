"""``lipdp doctor``: every line passes where all is well, and fails where its subject is broken."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lipdp_lightning.cli import main
from lipdp_lightning.doctor import device as on_device
from lipdp_lightning.doctor import machine, trial
from lipdp_lightning.doctor.finding import Finding, examine
from lipdp_lightning.kernels.numeric_environment import require_exact_arithmetic
from lipdp_lightning.mechanism.step import Mechanism

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def sound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A machine without Slurm, whatever this one has."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    yield
    require_exact_arithmetic()


def test_a_sound_machine_passes_on_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--run-dir", str(tmp_path / "runs")]) == 0
    page = capsys.readouterr().out
    assert page.splitlines()[-1] == "every line passes" and len(page.splitlines()) <= 40
    assert "HINT" not in page and "not countable on a CPU" in page
    assert os.listdir(tmp_path) == ["bin"], "it left something behind"


def test_the_versions_asked_for_are_those_of_the_installation() -> None:
    declared = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    for package, least in machine.NEEDED.items():
        assert f'"{package}>={".".join(map(str, least))}' in declared


def test_json_has_the_same_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--run-dir", str(tmp_path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    names = [line["name"] for line in content["lines"]]
    assert content["passed"] and content["device"] == "cpu" and content["format"] == 1
    assert names == [
        "versions", "device", "switches", "disk", "Slurm", "processes", "noise", "digest", "certificate",
        "sums",
        "repeated step", "waits", "time",
    ]  # fmt: skip
    parts = content["lines"][-1]["numbers"]
    assert set(parts) == {"certificate", "forward and backward", "release", "optimizer and projection"}


def test_a_gpu_that_is_not_there_fails_with_a_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["doctor", "--device", "cuda", "--run-dir", str(tmp_path)]) == 1
    page = capsys.readouterr().out
    assert "FAIL device" in page and page.count("HINT: ") == 1 and page.splitlines()[-1] == "1 of 5 lines fail"


# ---- planted faults


def version_of(package: str, version: str | None) -> Callable[[pytest.MonkeyPatch, Path], None]:
    true = importlib.metadata.version

    def planted(name: str) -> str:
        if name == package and version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version if name == package and version is not None else true(name)

    return lambda patch, _: patch.setattr(importlib.metadata, "version", planted)


def command(status: int) -> Callable[[pytest.MonkeyPatch, Path], None]:
    def plant(_: pytest.MonkeyPatch, folder: Path) -> None:
        for name in ("sbatch", "srun", "squeue", "scancel"):
            script = folder / "bin" / name
            script.write_text(f"#!/bin/sh\necho no controller >&2\nexit {status if name == 'srun' else 0}\n")
            script.chmod(0o755)

    return plant


def without_scancel(patch: pytest.MonkeyPatch, folder: Path) -> None:
    command(0)(patch, folder)
    (folder / "bin/scancel").unlink()


def a_file_in_the_way(_: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "runs").write_text("")


def other_bits(patch: pytest.MonkeyPatch, _: Path) -> None:
    true = on_device.normals
    patch.setattr(on_device, "normals", lambda *given: true(*given).float().double())


def low_norm(patch: pytest.MonkeyPatch, _: Path) -> None:
    true = Mechanism.boundary
    low = lambda self: {n: (0.999 * norm, most) for n, (norm, most) in true(self).items()}  # noqa: E731
    patch.setattr(Mechanism, "boundary", low)


def loose_norm(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(Mechanism, "boundary", lambda self: {"4": (7.0, 1.0)})


def full(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(machine.shutil, "disk_usage", lambda place: SimpleNamespace(free=1 << 20))


def wrong_sum(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(2))


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch, Path], object]]] = {
    "an old torch": ("versions", version_of("torch", "2.3.1+cu118")),
    "no cryptography": ("versions", version_of("cryptography", None)),
    "too many threads": ("device", lambda patch, _: patch.setattr(torch, "get_num_threads", lambda: 10_000)),
    "TF32 is forced": ("switches", lambda patch, _: patch.setenv("NVIDIA_TF32_OVERRIDE", "1")),
    "no gloo": ("processes", lambda patch, _: patch.setattr(dist, "is_gloo_available", lambda: False)),
    "a wrong sum over processes": ("processes", wrong_sum),
    "other bits of noise": ("noise", other_bits),
    "another key of the hash": ("digest", lambda patch, _: patch.setattr(on_device, "KEY", bytes(32))),
    "a norm that is too small": ("certificate", low_norm),
    "a norm that is too large": ("certificate", loose_norm),
    "another secret in every trial": (
        "repeated step",
        lambda patch, _: patch.setattr(trial, "_plan", lambda made=trial._plan: secret_of_its_own(patch, made())),
    ),
    "a step that ends with an error": (
        "time", lambda patch, _: patch.setattr(trial.Trial, "_summed_loss", lambda self: 1 / 0)
    ),
    "a full disk": ("disk", full),
    "a slow disk": ("disk", lambda patch, _: patch.setattr(machine, "_SLOW", 1e9)),
    "a file in place of the folder": ("disk", a_file_in_the_way),
    "Slurm does not answer": ("Slurm", command(1)),
    "a part of Slurm is missing": ("Slurm", without_scancel),
}  # fmt: skip


def secret_of_its_own(patch: pytest.MonkeyPatch, plan: Any) -> Any:
    patch.setattr(trial, "SECRET", os.urandom(16))
    return plan


@pytest.mark.parametrize("fault", FAULTS)
def test_a_line_fails_when_its_subject_is_broken(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, plant = FAULTS[fault]
    plant(monkeypatch, tmp_path)
    from lipdp_lightning.commands.doctor import checks

    found = examine(dict(checks(CPU, tmp_path / "runs"))[line])
    assert not found.passed and found.hint and found.text, found


def test_a_working_slurm_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command(0)(monkeypatch, tmp_path)
    assert machine.slurm() == Finding("sbatch, srun, squeue, scancel")


def test_a_failing_line_ends_with_status_1_and_a_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert main(["doctor", "--device", "cpu", "--run-dir", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    failing = next(number for number, line in enumerate(lines) if line.startswith("FAIL"))
    assert lines[failing].startswith("FAIL switches") and "HINT: unset it" in lines[failing + 1]
    assert lines[-1] == "1 of 13 lines fail"


def test_an_error_is_a_finding_with_its_own_hint() -> None:
    def broken() -> Finding:
        raise ValueError("it is broken.\nHINT: repair it.")

    assert examine(broken) == Finding("ValueError: it is broken.", "repair it.")
    assert examine(lambda: 1 / 0).hint.startswith("this part does not work here")  # type: ignore[arg-type,return-value]
