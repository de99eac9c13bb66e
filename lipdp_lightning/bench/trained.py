"""Defines contenders that Lightning trains: the network without privacy, and this library's private step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from ..data_modules.base import PrivateDataModule, box_norm
from ..data_modules.poisson import InMemoryRows, loader
from ..kernels.loops import cpu_loops
from ..privacy.plan import PrivacyPlan
from ..training import PrivateModule, PrivateStrategy
from .contenders import NOISE_MULTIPLIER, SECRET, Between, Job, sgd
from .networks import random_rows

ENOUGH_STEPS = 10**7
# the options of the plan for each contender
PLANS: dict[str, dict[str, Any]] = {
    "worst_case": {"scaling": "worst_case"},
    "layerwise": {"scaling": "layerwise"},
    "joint": {"scaling": "joint"},
    "exact": {"scaling": "exact", "radius": 0.1},
    "radius": {"scaling": "radius", "radius": 1.0},
    "loss_clip": {"scaling": "worst_case", "loss_clip": 0.15},
}


class RandomRows(PrivateDataModule):
    """Random rows with entries in [0, 1], and random labels."""

    task = "classification"

    def __init__(self, shape: tuple[int, ...], rows: int, classes: int = 10) -> None:
        super().__init__()
        self.input_shape, self.declared_size, self.num_classes = shape, rows, classes
        self.input_bound = box_norm(shape, 0.0, 1.0)

    def load_train(self) -> tuple[Tensor, Tensor]:
        return random_rows(self.input_shape, self.declared_size, int(self.num_classes or 0))


class BetweenSteps(Callback):
    def __init__(self, between: Between) -> None:
        self._between = between

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._between()


def trainer_of(job: Job, between: Between, **options: Any) -> lightning.Trainer:
    accelerator, _, index = job.device.partition(":")
    devices: Any = 1 if accelerator == "cpu" else [int(index or 0)]
    return lightning.Trainer(
        callbacks=[BetweenSteps(between)], accelerator=accelerator, devices=devices, max_epochs=-1,
        max_steps=ENOUGH_STEPS, use_distributed_sampler=False, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0, **options,
    )  # fmt: skip


class _Plain(lightning.LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y, _ = batch
        return F.cross_entropy(self.network(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())


class _Batches(Sampler[Tensor]):
    """The job's batches, an epoch of them at a time."""

    def __init__(self, job: Job) -> None:
        self._batches, self._length = job.batches(), job.rows // job.batch_size

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.islice(self._batches, self._length)


def lightning_loop(job: Job, between: Between) -> None:
    """Trains without privacy; batches are indexed from tensors in memory, and layers use the library's own loops."""
    cpu_loops()  # the loops are compiled here and not in the first step
    network = job.network
    rows = InMemoryRows(*random_rows(network.shape, job.rows, network.outputs))
    batches: DataLoader[Any] = loader(rows, _Batches(job))
    trainer_of(job, between).fit(_Plain(network.build()), batches)


def private(job: Job, between: Between) -> None:
    """Takes the step of `lipdp fit`: Poisson sample, certificate, scaling, float64 noise, update and projection."""
    train_privately(job, between, PLANS[job.contender])


def train_privately(job: Job, between: Between, options: dict[str, Any]) -> None:
    """Trains privately with these options of the plan."""
    network = job.network
    data = RandomRows(network.shape, job.rows, network.outputs)
    plan = PrivacyPlan.create(
        dataset_size=data.dataset_size, expected_batch_size=job.batch_size, noise_multiplier=NOISE_MULTIPLIER,
        delta=1e-6, steps=ENOUGH_STEPS, accountant="rdp", **options,
    )  # fmt: skip
    module = PrivateModule(network.build(), optimizer=sgd)
    strategy = PrivateStrategy(plan, fixed_secret=SECRET if job.memory else None)
    trainer_of(job, between, strategy=strategy).fit(module, datamodule=data)
