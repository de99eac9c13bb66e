"""What Lightning does at every step beside the private step is left to it: profilers, transfers, zeroing, clipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import SimpleProfiler
from small_runs import Blobs, fit, make_module, make_plan, weights


def test_a_profiler_that_was_asked_for_is_kept() -> None:
    profiler = SimpleProfiler()
    _, trainer = fit(make_plan(steps=2), trainer_options={"profiler": profiler})
    assert trainer.profiler is profiler
    assert len(profiler.recorded_durations["run_training_batch"]) == 2


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


def test_a_batch_is_transferred_once_by_the_data_module() -> None:
    for kind in (Counted, Transferred):
        data = kind()
        fit(make_plan(steps=3), data=data)
        assert data.arrivals >= 3 and data.transfers == (data.arrivals if kind is Transferred else 0)


class OwnZeroGrad(torch.optim.SGD):
    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        type(self).calls += 1
        super().zero_grad(set_to_none)


def test_gradients_are_zeroed_by_the_optimizer() -> None:
    module = make_module(optimizer=lambda parameters: OwnZeroGrad(parameters, lr=0.1))
    fit(make_plan(steps=3), module=module)
    assert OwnZeroGrad.calls == 3


def test_no_step_takes_over_gradients_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = fit(make_plan(steps=3))
    again, _ = fit(make_plan(steps=3))
    assert torch.equal(weights(own), weights(again))
    monkeypatch.setattr(torch.optim.SGD, "zero_grad", lambda self, set_to_none=True: None)
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
