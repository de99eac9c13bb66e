"""What is left out of a step is done where somebody asked for it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from small_runs import Blobs, fit, make_module, make_plan, weights

from data_modules.base import PrivateDataModule
from lipdp_lightning.training import PrivateModule, module
from lipdp_lightning.training.spared import Unprofiled, arrival_of, forget_gradients


def test_a_profiler_that_was_asked_for_is_kept() -> None:
    profiler = SimpleProfiler()
    _, trainer = fit(make_plan(steps=2), trainer_options={"profiler": profiler})
    assert trainer.profiler is profiler
    assert len(profiler.recorded_durations["run_training_batch"]) == 2


def test_without_one_nothing_is_measured() -> None:
    _, trainer = fit(make_plan(steps=2))
    assert type(trainer.profiler) is Unprofiled and trainer.global_step == 2
    trainer.profiler.start("anything")
    with trainer.profiler.profile("anything"):
        pass
    assert trainer.profiler.summary() == ""


class Counted(Blobs):
    """Counts the batches that arrive."""

    arrivals = transfers = 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.arrivals += 1
        return super().on_after_batch_transfer(batch, dataloader_idx)


class Transferred(Counted):
    """Has a transfer of its own."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.transfers += 1
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


class Halved(PrivateModule):
    """Prepares its own batches."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, *rest = batch
        return (x / 2, *rest)


def lightning_is_asked(data: PrivateDataModule, kind: type[PrivateModule] = PrivateModule, device: str = "cpu") -> bool:
    trainer = SimpleNamespace(lightning_module=make_module(kind=kind), datamodule=data, profiler=Unprofiled())
    return arrival_of(trainer, torch.device(device)) is None


def test_a_batch_on_a_cpu_is_left_where_it_is_and_prepared_by_the_data_module() -> None:
    data = Counted()
    fit(make_plan(steps=3), data=data)
    assert data.arrivals >= 3 and data.transfers == 0
    assert not lightning_is_asked(Counted())


def test_a_transfer_that_somebody_defines_is_carried_out() -> None:
    data = Transferred()
    fit(make_plan(steps=3), data=data)
    assert data.transfers >= 3 and data.arrivals == data.transfers
    assert lightning_is_asked(Transferred()) and lightning_is_asked(Blobs(), Halved)
    assert lightning_is_asked(Blobs(), device="cuda")


class OwnZeroGrad(torch.optim.SGD):
    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        type(self).calls += 1
        super().zero_grad(set_to_none)


def test_gradients_are_forgotten_as_the_optimizer_does() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    for optimizer in (torch.optim.SGD([parameter], lr=0.1), OwnZeroGrad([parameter], lr=0.1)):
        parameter.grad = torch.ones(3)
        forget_gradients(optimizer)
        assert parameter.grad is None
    assert OwnZeroGrad.calls == 1


def test_no_step_takes_over_gradients_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = fit(make_plan(steps=3))
    monkeypatch.setattr(module, "forget_gradients", lambda optimizer: optimizer.zero_grad())
    by_torch, _ = fit(make_plan(steps=3))
    assert torch.equal(weights(own), weights(by_torch))
    monkeypatch.setattr(module, "forget_gradients", lambda optimizer: None)
    kept, _ = fit(make_plan(steps=3))
    assert not torch.equal(weights(own), weights(kept))


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_released_gradients_are_clipped_where_that_is_asked_for(clip: float | None) -> None:
    class Norms(Callback):
        def __init__(self) -> None:
            self.norms: list[float] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            squares = [p.grad.square().sum() for p in pl_module.parameters() if p.grad is not None]
            self.norms.append(float(torch.stack(squares).sum().sqrt()))

    seen = Norms()
    fit(make_plan(steps=2), seen, trainer_options={"gradient_clip_val": clip})
    assert len(seen.norms) == 2
    assert all(norm <= 1e-3 * (1 + 1e-5) for norm in seen.norms) == (clip is not None)


def test_lightning_hands_the_index_of_the_batch_over() -> None:
    assert is_param_in_hook_signature(make_module().training_step, "batch_idx", min_args=2)
    assert list(inspect.signature(PrivateModule.training_step).parameters) == ["self", "batch", "batch_idx"]
