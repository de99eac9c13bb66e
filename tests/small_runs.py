"""Private runs small enough for tests: sixty rows, a few layers, a dozen steps, a real Trainer."""

from __future__ import annotations

import logging
import time
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lipdp_lightning.data_modules.base import PrivateDataModule
from lipdp_lightning.layers import MaxMin
from lipdp_lightning.privacy.branches import Branches
from lipdp_lightning.privacy.plan import PrivacyPlan
from lipdp_lightning.training import PrivateModule, PrivateStrategy
from lipdp_lightning.training.step_record import StepRecord

SECRET = bytes(range(16))
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


class Blobs(PrivateDataModule):
    """Three clusters in six dimensions; the test rows serve for validation too."""

    input_shape = (6,)
    task = "classification"
    num_classes = 3
    declared_size = 60

    def _rows(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        y = torch.arange(count) % 3
        return torch.eye(6)[y] + 0.3 * torch.randn(count, 6, generator=generator), y

    def load_train(self) -> tuple[Tensor, Tensor]:
        return self._rows(60, 0)

    def load_test(self) -> tuple[Tensor, Tensor]:
        return self._rows(30, 1)


class BlobsWithValidation(Blobs):
    """Validation rows that are not the test rows."""

    def load_validation(self) -> tuple[Tensor, Tensor]:
        return self._rows(12, 2)


def make_plan(**options: Any) -> PrivacyPlan:
    chosen: dict[str, Any] = {
        "dataset_size": 60, "expected_batch_size": 20, "steps": 12, "noise_multiplier": 1.0, "delta": 1e-3,
        "accountant": "rdp", "scaling": "joint", "allocation": "global", "allow_noncertified": True,
    } | options  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PrivacyPlan.from_dict(chosen)


def make_network(seed: int = 0, hidden: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, hidden), MaxMin(), nn.Linear(hidden, 3))


def make_module(rate: float = 0.1, kind: type[PrivateModule] = PrivateModule, **options: Any) -> PrivateModule:
    optimizer = options.pop("optimizer", lambda parameters: torch.optim.SGD(parameters, lr=rate))
    network = options.pop("network", None)
    return kind(make_network() if network is None else network, optimizer=optimizer, **options)


def make_strategy(plan: PrivacyPlan | None, directory: Path | None = None, **options: Any) -> PrivateStrategy:
    """With a directory, the run keeps its records there, as `lipdp fit` does."""
    kind = options.pop("strategy_kind", PrivateStrategy)
    options.setdefault("fixed_secret", SECRET)
    if directory is not None:
        options |= {"branches": Branches(directory / "ledger.json"), "record": StepRecord(directory / "steps.txt")}
    return kind(plan, **options)


def make_trainer(strategy: Any, *callbacks: Callback, **options: Any) -> lightning.Trainer:
    plan = getattr(strategy, "plan", None)
    chosen: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "max_epochs": -1, "max_steps": 12 if plan is None else plan.steps,
        "use_distributed_sampler": False, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    } | options  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lightning.Trainer(strategy=strategy, callbacks=list(callbacks), **chosen)


def fit(
    plan: PrivacyPlan,
    *callbacks: Callback,
    module: PrivateModule | None = None,
    data: PrivateDataModule | None = None,
    directory: Path | None = None,
    checkpoint: Path | None = None,
    trainer_options: dict[str, Any] | None = None,
    **strategy_options: Any,
) -> tuple[PrivateModule, lightning.Trainer]:
    """Train; the module and the trainer afterwards."""
    module = make_module() if module is None else module
    data = Blobs() if data is None else data
    trainer = make_trainer(make_strategy(plan, directory, **strategy_options), *callbacks, **(trainer_options or {}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(
            module, datamodule=data, ckpt_path=None if checkpoint is None else str(checkpoint), weights_only=False
        )
    return module, trainer


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


class Gradients(Callback):
    """What each hook finds in ``parameter.grad``, per call: one vector, or None where there is no gradient."""

    def __init__(self) -> None:
        self.after_backward: list[Tensor | None] = []
        self.before_step: list[Tensor | None] = []
        self.before_zero_grad: list[Tensor | None] = []

    @staticmethod
    def _read(module: nn.Module) -> Tensor | None:
        found = [p.grad for p in module.parameters()]
        return None if any(g is None for g in found) else torch.cat([g.double().flatten() for g in found])

    def on_after_backward(self, trainer: Any, pl_module: nn.Module) -> None:
        self.after_backward.append(self._read(pl_module))

    def on_before_optimizer_step(self, trainer: Any, pl_module: nn.Module, optimizer: Any) -> None:
        self.before_step.append(self._read(pl_module))


class Crash(Callback):
    """Ends training as a crash does, before the step of that number is taken."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            raise InterruptedError("a crash, for a test")


class Slowly(Callback):
    """Waits after each step, so that there is time to interrupt."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(self.seconds)
