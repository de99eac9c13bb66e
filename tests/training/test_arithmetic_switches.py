"""Switches of the arithmetic that change while a run trains, and runs whose bits do not repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import Blobs, Crash, Gradients, fit, make_plan, make_strategy

from lipdp_lightning.callbacks import ResumeCheckpoint
from lipdp_lightning.kernels.numeric_environment import arithmetic_problems, require_exact_arithmetic
from lipdp_lightning.training import context, private_steps, strategy
from lipdp_lightning.training import set_up as exact_products
from lipdp_lightning.training.settings import PrivacySettings

LONG = make_plan(steps=120)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    require_exact_arithmetic()
    yield
    require_exact_arithmetic()


SWITCHES: dict[str, Callable[[], object]] = {
    "the general default": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "convolutions": lambda: setattr(torch.backends.cudnn, "allow_tf32", True),
    "products": lambda: torch.set_float32_matmul_precision("high"),
    "bfloat16 sums": lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", True),
}


class Switching(Callback):
    """Turns a switch in one hook of the second step."""

    def __init__(self, hook: str, switch: Callable[[], object]) -> None:
        setattr(self, hook, lambda trainer, *_: switch() if trainer.global_step == 1 else None)


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_backward", "on_before_zero_grad"])
def test_a_switch_that_is_turned_in_mid_run_is_refused_before_the_release(switch: str, hook: str) -> None:
    seen = Gradients()
    with pytest.raises(ValueError, match=r"not that of the certificate[\s\S]*HINT: leave it alone"):
        fit(make_plan(steps=3), seen, Switching(hook, SWITCHES[switch]))
    assert len(seen.before_step) == 1, "the second step was released"


def test_every_switch_is_set_before_the_first_step() -> None:
    for switch in SWITCHES.values():
        switch()
    fit(make_plan(steps=1))
    assert arithmetic_problems() == []


def test_what_the_environment_forces_is_refused_in_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    seen = Gradients()
    with pytest.raises(ValueError, match="NVIDIA_TF32_OVERRIDE"):
        fit(make_plan(steps=1), seen)
    assert not seen.before_step


# ---- bits that do not repeat


def interrupted(directory: Path) -> Any:
    """A run that crashes at its sixth step, two steps after its last checkpoint, and goes on to the eighth."""
    keeper = ResumeCheckpoint(directory / "checkpoints", every_n_steps=4)
    directory.mkdir()
    with pytest.raises(InterruptedError):
        fit(LONG, Crash(6), keeper, directory=directory, data=Blobs())
    keeper, released = ResumeCheckpoint(directory / "checkpoints", every_n_steps=4), Gradients()
    saved, once = directory / "checkpoints/last.ckpt", {"max_steps": 8}
    trainer = fit(LONG, released, keeper, directory=directory, checkpoint=saved, data=Blobs(), trainer_options=once)[1]
    return trainer.strategy.branches


def test_where_bits_do_not_repeat_a_crash_costs_what_was_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where they do, it costs nothing: the choice of privacy.deterministic."""
    repeated = interrupted(tmp_path / "repeats")
    assert repeated.count == 1 and repeated.limit() == 120
    for module in (context, private_steps):
        monkeypatch.setattr(module, "can_repeat", lambda _: False)
    fresh = interrupted(tmp_path / "does not")
    assert fresh.count == 2 and fresh.limit() == 120 - (50 - 4)


def test_deterministic_is_a_setting_of_a_run_that_a_cpu_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert PrivacySettings(epsilon=1.0, steps=1, deterministic=True).deterministic
    assert not PrivacySettings(epsilon=1.0, steps=1).deterministic and not make_strategy(LONG).deterministic
    fit(make_plan(steps=1), deterministic=True)
    assert not torch.are_deterministic_algorithms_enabled()


def test_on_a_gpu_it_is_asked_for_in_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(exact_products, "require_repeated_bits", lambda: asked.append("repeated bits"))
    for device, chosen in (("cpu", True), ("cuda", False)):
        exact_products.require_exact_products(torch.device(device), chosen)
    assert not asked
    exact_products.require_exact_products(torch.device("cuda", 0), True)
    assert asked == ["repeated bits"]
    monkeypatch.setattr(strategy, "require_exact_products", lambda *given: asked.append(given))
    fit(make_plan(steps=1), deterministic=True)
    assert asked[1:] == [(torch.device("cpu"), True)]
