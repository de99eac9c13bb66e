"""Callbacks of a project are handed no training batch, no training loss and no gradient without noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, Timer
from small_projects import all_weights, fit, privatize
from small_runs import make_plan
from torch import Tensor

from lipdp_lightning.adoption import private_trainer
from lipdp_lightning.adoption.project_strategy import WithheldBatch, WithheldLoss
from lipdp_lightning.training.strategy import PrivateStrategy

EXACT: dict[str, Any] = {"scaling": "exact", "radius": 1.0, "max_norm": None}
SCALINGS: dict[str, dict[str, Any]] = {"exact": EXACT, "joint": {"scaling": "joint", "max_norm": 1.0}}
USES: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "item": lambda loss: loss.item(),
    "comparison": lambda loss: bool(loss > 1),
    "format": lambda loss: f"{loss:.3f}",
    "numpy": lambda loss: loss.numpy(),
    "list": lambda loss: loss.tolist(),
    "sum": lambda loss: sum([loss]),
    "stack": lambda loss: torch.stack([loss]),
    "a function of torch": torch.isfinite,
    "in place": lambda loss: loss.mul_(2),
    "move": lambda loss: loss.cpu(),
}
BATCH_USES: dict[str, Callable[[Any], Any]] = {
    "size": len,
    "first": lambda batch: batch[0],
    "rows": list,
    "shape": lambda batch: batch.shape,
    "unpacked": lambda batch: [part for part in batch],
    "member": lambda batch: 1 in batch,
}


class Prints(Callback):
    """Prints what its hooks are given."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        print("batch", batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        print("loss", loss)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        print("end", outputs, batch)


class Uses(Callback):
    """Calls a function on the batch or on the loss, in one hook."""

    def __init__(self, hook: str, use: Callable[[Any], Any], of_batch: bool) -> None:
        self.hook, self.use, self.of_batch = hook, use, of_batch

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._call("start", batch, None)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._call("backward", None, loss)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._call("end", batch, outputs["loss"])

    def _call(self, hook: str, batch: Any, loss: Any) -> None:
        if hook == self.hook:
            self.use(batch if self.of_batch else loss)


def test_a_callback_that_prints_its_arguments_prints_nothing_of_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    fit(privatize(), Prints(), max_steps=2)
    assert set(capsys.readouterr().out.splitlines()) == {
        "batch <a training batch, withheld>",
        "loss <a training loss, withheld>",
        "end {'loss': <a training loss, withheld>} <a training batch, withheld>",
    }


@pytest.mark.parametrize("hook", ["backward", "end"])
@pytest.mark.parametrize("name", USES)
def test_a_callback_cannot_use_the_training_loss(name: str, hook: str) -> None:
    with pytest.raises(ValueError, match=r"training loss is private.*HINT.*log_nonprivate"):
        fit(privatize(), Uses(hook, USES[name], False), max_steps=1)


@pytest.mark.parametrize("hook", ["start", "end"])
@pytest.mark.parametrize("name", BATCH_USES)
def test_a_callback_cannot_use_a_training_batch(name: str, hook: str) -> None:
    with pytest.raises(ValueError, match=r"training batch is private.*HINT"):
        fit(privatize(), Uses(hook, BATCH_USES[name], True), max_steps=1)


@pytest.mark.parametrize("hook", ["backward", "end"])
def test_the_value_of_the_loss_is_not_in_what_callbacks_are_given(hook: str) -> None:
    """A callback that evades the messages finds NaN."""
    found: list[float] = []

    def evade(loss: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            found.append(float(loss))

    fit(privatize(), Uses(hook, evade, False), max_steps=2)
    assert len(found) == 2 and all(value != value for value in found)


@pytest.mark.parametrize("size", [None, 5])
def test_withholding_changes_no_weight(size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    withheld, shown = (privatize(physical_batch_size=size) for _ in range(2))
    fit(withheld)
    monkeypatch.setattr(private_trainer, "ProjectStrategy", PrivateStrategy)
    fit(shown)
    assert torch.equal(all_weights(withheld.module), all_weights(shown.module))


class SeenGradients(Callback):
    """Keeps what each hook finds in ``parameter.grad``, with the name of the hook."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Tensor | None]] = []

    def _keep(self, hook: str, module: Any) -> None:
        found = [p.grad for p in module.parameters()]
        present = [g.double().flatten() for g in found if g is not None]
        self.seen.append((hook, torch.cat(present).clone() if present else None))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._keep("batch_start", pl_module)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._keep("before_backward", pl_module)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._keep("after_backward", pl_module)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._keep("before_zero_grad", pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._keep("before_step", pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._keep("batch_end", pl_module)


def unreleased(seen: list[tuple[str, Tensor | None]]) -> list[str]:
    """Returns the hooks that found a gradient which is not that of an optimizer's step."""
    released = [gradient for hook, gradient in seen if hook == "before_step"]
    return [
        hook
        for hook, gradient in seen
        if gradient is not None and not any(r is not None and torch.equal(gradient, r) for r in released)
    ]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("size", [None, 5])
def test_every_hook_finds_a_release_or_no_gradient(size: int | None, scaling: str) -> None:
    """Releases are told from sums by the noise, which is a thousand times as large as they are."""
    seen = SeenGradients()
    plan = make_plan(**SCALINGS[scaling], noise_multiplier=1000.0, steps=4)
    fit(privatize(plan=plan, physical_batch_size=size, input_bound=3.0), seen)
    steps = [gradient for hook, gradient in seen.seen if hook == "before_step"]
    assert len(steps) == 4 and all(g is not None and float(g.std()) > 20 for g in steps)
    assert unreleased(seen.seen) == []
    chunks = 1 if size is None else 4
    backward = [gradient for hook, gradient in seen.seen if hook == "after_backward"]
    assert len(backward) == 4 * chunks
    assert all((g is None) == (i % chunks < chunks - 1) for i, g in enumerate(backward))


def test_a_strategy_that_leaves_sums_in_place_fails_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[PrivateStrategy] = []
    backward = PrivateStrategy.backward

    def leaves(self: PrivateStrategy, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        end, self._end_pass = self._end_pass, lambda: late.append(self)  # type: ignore[method-assign]
        try:
            return backward(self, loss, *args, **kwargs)
        finally:
            self._end_pass = end  # type: ignore[method-assign]
            self._end_pass()

    monkeypatch.setattr(PrivateStrategy, "backward", leaves)
    monkeypatch.setattr("lipdp_lightning.training.current_step.StepIdentity.check", lambda *_, **__: None)
    seen = SeenGradients()
    fit(privatize(plan=make_plan(max_norm=1.0, steps=2)), seen)
    assert late and "after_backward" in unreleased(seen.seen)


def test_the_strategy_without_withholding_shows_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above would notice a Trainer that uses PrivateStrategy as it is."""
    monkeypatch.setattr(private_trainer, "ProjectStrategy", PrivateStrategy)
    found: list[Any] = []

    class Keeps(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            found.append((outputs["loss"], batch))

    fit(privatize(), Keeps(), max_steps=1)
    ((loss, batch),) = found
    assert float(loss) > 0 and len(batch[0]) and not isinstance(loss, WithheldLoss)
    assert not isinstance(batch, WithheldBatch)


def test_callbacks_of_lightning_run(tmp_path: Any) -> None:
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_weights_only=True)
    trainer = fit(
        privatize(), checkpoint, Timer(), max_steps=3, enable_checkpointing=True, enable_progress_bar=True,
        default_root_dir=tmp_path,
    )  # fmt: skip
    assert trainer.global_step == 3 and checkpoint.best_model_path
