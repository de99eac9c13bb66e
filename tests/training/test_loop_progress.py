"""Runs that continue from a checkpoint of any hook: every step of the plan is taken, once, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from small_runs import SECRET, BlobsWithValidation, fit, make_module, make_plan, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lipdp_lightning
from lipdp_lightning.callbacks import ResumeCheckpoint
from lipdp_lightning.training import PrivateModule

SAVED_IN = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end",
    "on_train_end",
)  # fmt: skip


class Classifier(lightning.LightningModule):
    """A project whose learning rate is set at the start of an epoch, by the number of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.epochs: list[tuple[int, int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))

    def on_train_epoch_start(self) -> None:
        self.epochs.append((self.current_epoch, self.trainer.global_step))
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = 0.1 / (1 + self.current_epoch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class EveryHook(Callback):
    """Saves a checkpoint in every hook."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def _save(self, trainer: lightning.Trainer, hook: str) -> None:
        if trainer.strategy.between_steps and not trainer.sanity_checking:  # type: ignore[attr-defined]
            self.count += 1
            trainer.save_checkpoint(self.folder / f"{self.count:03}_{trainer.global_step}_{hook}.ckpt")

    def __getattribute__(self, name: str) -> Any:
        if name in SAVED_IN:
            return lambda trainer, *_: self._save(trainer, name)
        return super().__getattribute__(name)


class Killed(Callback):
    """Ends training as a crash does, in one hook after a number of steps."""

    def __init__(self, hook: str, step: int) -> None:
        def crash(trainer: lightning.Trainer, *_: Any) -> None:
            if trainer.global_step == step:
                raise InterruptedError("a crash, for a test")

        setattr(self, hook, crash)


def rows() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*BlobsWithValidation().load_train()), batch_size=20)


def project_run(
    steps: int, *callbacks: Any, checkpoint: Path | None = None, size: int | None = None, epochs: int | None = None,
    project: type[Classifier] = Classifier, **options: Any,
) -> tuple[Any, list[tuple[int, int]], int]:  # fmt: skip
    """Returns the weights, the epochs that were begun, and the number of steps of a project under privacy."""
    private = lipdp_lightning.privatize(
        project(), rows(), size=60, plan=make_plan(scaling="exact", radius=1.0, max_norm=None, steps=steps),
        physical_batch_size=size,
    )  # fmt: skip
    chosen = {
        "accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "enable_model_summary": False,
        "num_sanity_val_steps": 0, "logger": False, "enable_checkpointing": False,
    } | options  # fmt: skip
    trainer = private.Trainer(callbacks=list(callbacks), max_epochs=epochs, **chosen)
    trainer.strategy.fixed_secret = SECRET
    held_out = DataLoader(TensorDataset(*BlobsWithValidation().load_test()), batch_size=30)
    trainer.fit(private.module, private.data, held_out, ckpt_path=checkpoint, weights_only=False)
    return weights(private.module).tolist(), private.module.project.epochs, trainer.global_step


def saved(folder: Path) -> Iterator[tuple[int, str, Path]]:
    for file in sorted(folder.iterdir()):
        _, step, hook = file.stem.split("_", 2)
        yield int(step), hook, file


@pytest.mark.parametrize("size", [None, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("steps", "options"),
    [
        pytest.param(12, {}, marks=pytest.mark.slow),
        pytest.param(11, {}, marks=pytest.mark.slow),
        pytest.param(8, {}, marks=pytest.mark.slow),
        (6, {"check_val_every_n_epoch": 2}),
        pytest.param(6, {"val_check_interval": 2}, marks=pytest.mark.slow),
        (2, {}),
    ],
)
def test_a_project_continues_from_a_checkpoint_of_every_hook(
    tmp_path: Path, steps: int, options: dict[str, Any], size: int | None
) -> None:
    whole = project_run(steps, EveryHook(tmp_path), size=size, **options)
    assert whole[2] == steps and whole[1] == [(epoch, 3 * epoch) for epoch in range(-(-steps // 3))]
    found = list(saved(tmp_path))
    assert {hook for _, hook, _ in found} >= set(SAVED_IN) - ({"on_validation_end"} if steps == 2 else set())
    for step, hook, file in found:
        end, epochs, taken = project_run(steps, checkpoint=file, size=size, **options)
        assert (end, taken) == (whole[0], steps), f"{hook} after {step} steps"
        assert epochs == [(e, first) for e, first in whole[1] if first >= step], f"{hook} after {step} steps"


def test_a_project_continues_from_the_checkpoints_of_lightnings_callback(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1)
    whole, _, _ = project_run(12, keeper, enable_checkpointing=True)
    files = list(tmp_path.iterdir())
    assert len(files) == 4
    for file in files:
        assert project_run(12, checkpoint=file)[::2] == (whole, 12)


@pytest.mark.parametrize("stop", [pytest.param({"epochs": 2}, marks=pytest.mark.slow), {"max_steps": 4}])
def test_a_run_that_was_asked_for_less_is_continued_to_its_end(tmp_path: Path, stop: dict[str, int]) -> None:
    whole = project_run(12)
    _, epochs, taken = project_run(12, EveryHook(tmp_path), **stop)
    *_, (step, hook, file) = saved(tmp_path)
    assert step == taken < 12 and hook == "on_train_end"
    rest = project_run(12, checkpoint=file)
    assert (rest[0], [*epochs, *rest[1]], rest[2]) == whole


def scheduled(interval: str, monitor: str | None) -> type[PrivateModule]:
    class Scheduled(PrivateModule):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
            if monitor is None:
                made: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
            else:  # every validation is one too many without progress
                made = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0, threshold=10.0)
            schedule = {"scheduler": made, "interval": interval}
            return {"optimizer": optimizer, "lr_scheduler": schedule | ({"monitor": monitor} if monitor else {})}

    return Scheduled


@pytest.mark.parametrize("monitor", [None, "validation/accuracy"])
@pytest.mark.parametrize("size", [None, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("hook", "step"),
    [
        ("on_train_epoch_end", 6), ("on_train_batch_start", 6),
        *(pytest.param(*place, marks=pytest.mark.slow) for place in (
            ("on_train_batch_end", 3), ("on_validation_end", 6), ("on_train_epoch_start", 6),
            ("on_train_epoch_end", 12), ("on_train_batch_start", 7), ("on_train_batch_end", 8),
        )),
    ],
)  # fmt: skip
def test_a_run_that_is_killed_at_an_epochs_end_ends_with_the_same_bits(
    tmp_path: Path, hook: str, step: int, size: int | None, monitor: str | None
) -> None:
    def session(name: str, *callbacks: Callback) -> Any:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        last = folder / "checkpoints" / "last.ckpt"
        module = make_module(kind=scheduled("epoch", monitor))
        module._make_optimizer = None
        return fit(
            make_plan(), *callbacks, ResumeCheckpoint(folder / "checkpoints", every_n_steps=1), module=module,
            data=BlobsWithValidation(), directory=folder, checkpoint=last if last.exists() else None,
            physical_batch_size=size, trainer_options={"limit_val_batches": 1.0},
        )  # fmt: skip

    module, trainer = session("whole")
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    with pytest.raises(InterruptedError):
        session("parts", Killed(hook, step))
    again, continued = session("parts")
    assert continued.global_step == trainer.global_step == 12
    assert continued.current_epoch == trainer.current_epoch == 4
    assert continued.optimizers[0].param_groups[0]["lr"] == rate
    assert torch.equal(weights(again), weights(module))
